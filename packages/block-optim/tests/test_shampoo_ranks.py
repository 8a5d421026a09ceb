"""Shampoo and SOAP on real ranks: the bits of one process, and no bytes that the layout made unnecessary."""

import functools
import logging
from typing import Any

import pytest
import shampoo_ranks as ranks
import torch

from ragged_shard.testing import run_ranks

VARIANTS: dict[str, dict[str, Any]] = {
    "shampoo": {"betas": (0.9, 0.95), "momentum": 0.9, "weight_decay": 0.1},
    "kl": {"kl": True, "root_method": "newton", "start_preconditioning_step": 2},
    "qr": {
        "betas": (0.9, 1.0),
        "root_method": "qr",
        "grafting": "sgd",
        "overlap": True,
        "diagonal_above": 20,
    },
    "soap": {"diagonal_above": 20},
    "soap beside": {"overlap": True, "first_step_update": True, "stagger": False},
}


def kind_of(variant):
    return "soap" if variant.startswith("soap") else "shampoo"


@functools.cache
def alone(variant):
    return ranks.reference(kind_of(variant), **VARIANTS[variant])


def same(found, expected):
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), f"tensor {i} of shape {tuple(a.shape)}: {(a - b).abs().max()}"


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR, "block_optim")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_layout_and_world_size_gives_the_bits_of_one_process(world_size):
    """Parameters, factors, roots, bases and moments, in full."""
    layouts = {1: ["planned"], 2: ["elements", "shard"], 3: ["planned", "elements"], 4: ["shard", "rows"]}[
        world_size
    ]
    runs: list[Any] = [
        (kind_of(variant), layout, (), seed, options)
        for seed, (variant, options) in enumerate(VARIANTS.items())
        for layout in layouts
    ]
    if world_size == 4:
        runs += [(kind_of(v), "rows", (2, 2), 9, VARIANTS[v]) for v in ("shampoo", "soap")]
    expected = {variant: alone(variant) for variant in VARIANTS}
    names = {id(options): variant for variant, options in VARIANTS.items()}
    found = run_ranks(world_size, ranks.many_runs, runs)[0]
    for run, result in zip(runs, found, strict=True):
        same(result, expected[names[id(run[4])]])


@pytest.mark.parametrize("kind", ["shampoo", "soap"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_with_the_block_policy_a_step_sends_nothing(kind, world_size):
    known = {"grad_norm": 1.0}
    for sent in run_ranks(world_size, ranks.collectives_of, kind, "planned", {}, known):
        assert sent == ([], 0, 0, [])
    for sent in run_ranks(world_size, ranks.collectives_of, kind, "planned", {"skip_nonfinite": False}, {}):
        assert sent == ([], 0, 0, [])
    for kinds, *_ in run_ranks(world_size, ranks.collectives_of, kind, "planned", {}, {}):
        assert kinds == ["all_reduce"]  # the agreement that gradients are finite


@pytest.mark.parametrize("kind", ["shampoo", "soap"])
def test_blocks_that_are_not_local_cost_what_the_optimizer_says_and_it_says_how_to_avoid_it(kind):
    found = run_ranks(3, ranks.collectives_of, kind, "shard", {}, {"grad_norm": 1.0})
    promised = found[0][2]
    assert promised > 0
    for kinds, _, says, messages in found:
        assert kinds == ["all_reduce", "all_to_all", "all_to_all"]
        assert says == promised
        assert len(messages) == 1
        assert f"{promised / 1e6:.3g} MB" in messages[0]
        assert (
            f"block_policy={'SOAP' if kind == 'soap' else 'Shampoo'}.block_policy(max_preconditioner_dim=4)"
            in messages[0]
        )
    assert sum(sent for _, sent, _, _ in found) == promised


def test_bytes_are_twice_what_owners_do_not_hold():
    """(8, 8) on 3 ranks: rows 0-3, 3-6, 6-8; strips 0-4, 4-8. One row each way for the first, two for the second."""
    found = run_ranks(3, ranks.collectives_of, "shampoo", "shard", {"shapes": ((8, 8),)}, {"grad_norm": 1.0})
    assert found[0][2] == 2 * (8 + 2 * 8) * 4


def test_a_cut_through_columns_is_refused_by_name_on_every_rank():
    for message in run_ranks(2, ranks.refusal, "soap"):
        assert message.startswith("head: placements (Shard(dim=1),) cut it other than along its rows")


@pytest.mark.parametrize("layout", ["planned", "shard"])
def test_missing_gradients_and_bad_ones_do_what_they_do_in_one_process(layout):
    single = ranks.Run("shampoo")
    for number in range(3):
        single.step(number)
    single.step(3, without=(0, 4))
    single.step(5)
    for result, skipped in run_ranks(3, ranks.missing_and_bad, "shampoo", layout):
        assert skipped == 1
        same(result, single.result())


def test_a_moving_gradient_that_is_missing_on_some_ranks_counts_as_zero_there():
    shapes = ((9, 4), (6, 5))
    single = ranks.Run("soap", shapes=shapes)
    for number in range(4):
        for i, (param, grad) in enumerate(
            zip(single.params, ranks.tensors(100 + number, shapes), strict=True)
        ):
            if i == 1:
                grad[2:] = 0  # what ranks 1 and 2 of 3 hold
            param.grad = grad
        single.optimizer.step()
    for result in run_ranks(3, ranks.absent_on_some, "soap"):
        same(result, single.result())
