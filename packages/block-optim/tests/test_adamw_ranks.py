"""On real ranks: one process's bits in every layout, one flag and nothing else on the wire."""

import logging
import math

import pytest
import torch
import torch.distributed as dist
from adamw_helpers import KINDS, full_state, give_gradients, make_optimizer, parameters, train
from runs import full, same
from torch.distributed.tensor import Replicate

from block_optim import AdamW
from ragged_shard import RaggedShard, distribute_tensor
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives, run_ranks

RANKS = [1, 2, 3, 4]


def every_layout(wanted):
    for kind, result in wanted.items():
        for layout, cuts in (("ragged", 0), ("ragged", 1), ("ragged", 2), ("rows", 0)):
            same(train(kind, layout, cuts), result)


@pytest.mark.parametrize("ranks", RANKS)
def test_all_cuts_give_the_bits_of_one_process(ranks):
    run_ranks(ranks, every_layout, {kind: train(kind) for kind in KINDS})


def rounded(wanted):
    for kind, result in wanted.items():
        for cuts in (0, 1):
            found = train(kind, "ragged", cuts, dtype=torch.bfloat16, stochastic_rounding=True)
            same(found, result)


@pytest.mark.parametrize("ranks", [2, 3])
def test_stochastic_rounding_gives_the_same_bits_in_all_cuts(ranks):
    kinds = [kind for kind in KINDS if kind != "AdamW fused"]
    options = {"dtype": torch.bfloat16, "stochastic_rounding": True}
    run_ranks(ranks, rounded, {kind: train(kind, **options) for kind in kinds})


# ---------------------------------------------------------------- collectives and non-finite gradients


def count_collectives(kind):
    params = parameters(kind, "ragged")
    optimizer = make_optimizer(kind, params)
    with record_collectives() as building:
        make_optimizer(kind, params)
    assert building.kinds == []
    give_gradients(params, kind, "ragged")
    with record_collectives() as record:
        optimizer.step()
    ranks = dist.get_world_size()
    assert record.kinds == (["all_reduce"] if ranks > 1 else [])
    assert record.bytes_sent == pytest.approx(2 * 4 * (ranks - 1) / ranks)
    norm = torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
    with record_collectives() as record:
        optimizer.step(grad_norm=norm)
        optimizer.found_inf = torch.tensor(0.0)
        optimizer.step()
        del optimizer.found_inf
    assert record.kinds == []
    unchecked = make_optimizer(kind, params, skip_nonfinite=False)
    with record_collectives() as record:
        unchecked.step()
    assert record.kinds == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_sends_four_bytes_or_nothing(kind):
    for ranks in (1, 3):
        run_ranks(ranks, count_collectives, kind)


@on_ranks(4)
def test_replicas_are_not_asked():
    mesh = rank_mesh(2, 2)
    full = torch.ones(8, 4)
    hsdp = torch.nn.Parameter(distribute_tensor(full, mesh, [Replicate(), RaggedShard((0,), (1, 3))]))
    optimizer = AdamW([hsdp])
    hsdp.grad = torch.ones_like(hsdp)
    with record_collectives() as record:
        optimizer.step()
    assert [(e.kind, e.ranks) for e in record.events] == [("all_reduce", 2)]


class Messages(logging.Handler):
    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        self.found.append(record.getMessage())


def skipped_everywhere(kind, bad):
    params = parameters(kind, "ragged", 1)
    optimizer = make_optimizer(kind, params)
    give_gradients(params, kind, "ragged", 1)
    optimizer.step()
    before = full_state(params, optimizer)
    messages = Messages()
    logging.getLogger("block_optim").addHandler(messages)
    logging.getLogger("block_optim").propagate = False
    local = params["second"].grad.to_local()
    holder = local.numel() > 0
    if holder:
        local.view(-1)[-1] = bad  # on some ranks only
    for _ in range(2):
        optimizer.step()
    same(full_state(params, optimizer), before)
    assert optimizer.skipped_steps == 2
    norm = torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
    optimizer.step(grad_norm=norm)
    assert optimizer.skipped_steps == 3
    same(full_state(params, optimizer), before)
    logging.getLogger("block_optim").removeHandler(messages)
    assert len(messages.found) == 3
    assert ("second" in messages.found[0]) == holder
    assert "3 skipped" in messages.found[2]
    give_gradients(params, kind, "ragged", 1)
    optimizer.step()
    assert not torch.equal(full(params["first"].detach()), before["first"])
    return holder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_one_ranks_bad_gradient_skips_the_step_on_every_rank_and_is_told_once(kind, bad):
    holders = run_ranks(3, skipped_everywhere, kind, bad)
    assert any(holders)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_whatever_lies_between_tensors_is_neither_read_into_results_nor_written(kind):
    wanted = train(kind)
    params = parameters(kind, "ragged")
    optimizer = make_optimizer(kind, params)
    for step in range(3):
        give_gradients(params, kind, "ragged", 0, step)
        flat = next(iter(params.values())).grad.to_local()
        storage = torch.empty(0).set_(flat.untyped_storage())
        inside = torch.zeros(storage.numel(), dtype=torch.bool)
        for p in params.values():
            part = p.grad.to_local()
            inside[part.storage_offset() : part.storage_offset() + part.numel()] = True
        storage[~inside] = math.nan
        if step == 1:
            params["tail"].grad = None
        optimizer.step()
    assert optimizer.skipped_steps == 0
    same(full_state(params, optimizer), wanted)
    local = next(iter(params.values())).to_local()
    storage = torch.empty(0).set_(local.untyped_storage())
    assert (storage == 7.25).sum() >= 3 * (len(params) - 1)  # the gaps between parameters are as they were


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(3)
def test_a_rank_without_gradients_neither_hangs_nor_counts(kind):
    params = parameters(kind, "ragged")
    optimizer = make_optimizer(kind, params)
    give_gradients(params, kind, "ragged")
    if dist.get_rank() == 1:
        for p in params.values():
            p.grad = None
    optimizer.step()
    for p in params.values():
        assert optimizer.state[p]["step"] == (0 if dist.get_rank() == 1 else 1)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(3)
def test_full_states_load_into_parts_without_communication(kind):
    plain = parameters(kind)
    theirs = make_optimizer(kind, plain)
    give_gradients(plain, kind)
    theirs.step()
    params = parameters(kind, "ragged", 1)
    optimizer = make_optimizer(kind, params)
    with record_collectives() as record:
        optimizer.load_state_dict(theirs.state_dict())
    assert record.kinds == []
    for name, p in params.items():
        for key, value in theirs.state[plain[name]].items():
            assert torch.equal(full(optimizer.state[p][key]), value), (name, key)
