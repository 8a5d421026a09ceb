"""Optimizers with their states in CPU memory, on ranks that exchange: each has a simulated device."""

import copy
import math

import pytest
import torch
from runtime_helpers import loss_of, same_bits, tokens
from test_offloaded_optimizer import BLOCKS, prepared, same_states, train

from ragged_shard.testing import SimulatedDevice, on_ranks


@pytest.mark.parametrize(
    "kind",
    [k if k == "adamw8bit" else pytest.param(k, marks=pytest.mark.long) for k in ("torch adamw", *BLOCKS)],
)
@on_ranks(3)
def test_on_ranks_values_are_the_same_and_state_dicts_go_from_one_to_the_other(kind):
    """Learning rates are in the state dicts; the size of buckets may differ."""
    with SimulatedDevice("cpu", lambda: True):
        plain, optimizer = prepared(kind, False)
        model, offloaded = prepared(kind, True)
        assert same_bits(train(plain, optimizer, range(2)), train(model, offloaded, range(2)))
        states = [
            copy.deepcopy(one.state_dict()) for one in (offloaded, optimizer)
        ]  # torch's share what they load
        values = copy.deepcopy(plain.state_dict())
        same_states(*states)
        expected = train(plain, optimizer, range(2, 4))
        for given, with_it in zip(states, (False, True), strict=True):  # each continues from the other's
            again, loaded = prepared(kind, with_it, 2000)
            again.load_state_dict(values)
            loaded.load_state_dict(copy.deepcopy(given))
            same_states(loaded.state_dict(), states[1])
            assert same_bits(train(again, loaded, range(2, 4)), expected)


@pytest.mark.parametrize("kind", ["adamw8bit", "muon"])
@on_ranks(2)
def test_where_one_rank_has_a_gradient_that_is_not_finite_no_block_is_updated(kind):
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    with SimulatedDevice("cpu", lambda: True):
        found = []
        for with_it in (False, True):
            model, optimizer = prepared(kind, with_it)
            train(model, optimizer, range(1))
            for grad_norm in (None, math.nan, torch.tensor(math.inf)):
                loss_of(model, tokens(5)).backward()
                if last and grad_norm is None:
                    model.head.weight.grad.to_local().fill_(math.nan)
                optimizer.step(grad_norm=grad_norm)
                optimizer.zero_grad()
            found.append(train(model, optimizer, range(1, 3)))
        assert all(value.isfinite().all() for value in found[0])
        assert same_bits(*found)
