"""Shampoo and SOAP on real ranks: the bits of one process, and no bytes that the layout made unnecessary."""

import functools
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runs import Run, same

from block_optim import SOAP, Shampoo
from ragged_shard.testing import record_collectives, run_ranks

# Square, tall, odd, stacked experts, a convolution, a vector, a scalar, a single row.
SHAPES = ((8, 8), (22, 5), (7, 11), (3, 6, 5), (6, 2, 3, 2), (9,), (), (1, 7))
KINDS = {"shampoo": Shampoo, "soap": SOAP}
VARIANTS: dict[str, dict[str, Any]] = {
    "shampoo": {"betas": (0.9, 0.95), "momentum": 0.9, "weight_decay": 0.1},
    "shampoo kl": {"kl": True, "root_method": "newton", "start_preconditioning_step": 2},
    "shampoo sums": {"betas": (0.9, 1.0), "grafting": "rmsprop", "overlap": True, "diagonal_above": 20},
    "soap": {"diagonal_above": 20},
    "soap beside": {"overlap": True, "stagger": False},
}


def run_of(variant, layout="plain", mesh_shape=(), **options):
    small = {"lr": 0.05, "precondition_frequency": 2, "max_preconditioner_dim": 4, "shapes": SHAPES}
    kind = KINDS[variant.split()[0]]
    return Run(kind, layout, mesh_shape, **{**small, **VARIANTS[variant], **options})


@functools.cache
def alone(variant):
    return run_of(variant).steps(0, 6).result()


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR, "block_optim")


def results(runs):
    found = [run_of(*args).steps(0, 6).result() for args in runs]
    return found if dist.get_rank() == 0 else None


@pytest.mark.parametrize(
    ("world_size", "layouts"),
    [
        (1, ["planned"]),
        pytest.param(2, ["elements", "shard"], marks=pytest.mark.long),
        (3, ["planned", "elements"]),
        pytest.param(4, ["shard", "rows"], marks=pytest.mark.long),
    ],
)
def test_every_layout_and_world_size_gives_the_bits_of_one_process(world_size, layouts):
    """Parameters, factors, roots, bases and moments, in full."""
    runs: list[Any] = [(variant, layout) for variant in VARIANTS for layout in layouts]
    if world_size == 4:
        runs += [(variant, "rows", (2, 2)) for variant in ("shampoo", "soap")]
    for args, result in zip(runs, run_ranks(world_size, results, runs)[0], strict=True):
        same(result, alone(args[0]))


def collectives_of(kind, layout, options, step_options):
    """Kinds and bytes of the collectives of a step, what the optimizer says it sends, and its warnings."""
    messages: list[str] = []

    class Messages(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    handler = Messages()
    logging.getLogger("block_optim").setLevel(
        logging.WARNING
    )  # ranks stay, and other tests make theirs quiet
    logging.getLogger("block_optim").addHandler(handler)
    try:
        run = run_of(kind, layout, diagonal_above=65536, **options)
    finally:
        logging.getLogger("block_optim").removeHandler(handler)
    run.step(0, **step_options)
    with record_collectives() as record:
        run.step(1, **step_options)
    sent = sum(e.bytes_sent for e in record.events if e.kind == "all_to_all")
    return record.kinds, sent, run.optimizer.bytes_per_step, messages


@pytest.mark.parametrize("kind", ["shampoo", "soap"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_with_the_block_policy_a_step_sends_nothing(kind, world_size):
    known = {"grad_norm": 1.0}
    for sent in run_ranks(world_size, collectives_of, kind, "planned", {}, known):
        assert sent == ([], 0, 0, [])
    for sent in run_ranks(world_size, collectives_of, kind, "planned", {"skip_nonfinite": False}, {}):
        assert sent == ([], 0, 0, [])
    for kinds, *_ in run_ranks(world_size, collectives_of, kind, "planned", {}, {}):
        assert kinds == ["all_reduce"]  # the agreement that gradients are finite


@pytest.mark.parametrize("kind", ["shampoo", "soap"])
def test_blocks_that_are_not_local_cost_what_the_optimizer_says_and_it_says_how_to_avoid_it(kind):
    found = run_ranks(3, collectives_of, kind, "shard", {}, {"grad_norm": 1.0})
    promised = found[0][2]
    assert promised > 0
    for kinds, _, says, _ in found:
        assert kinds == ["all_reduce", "all_to_all", "all_to_all"]
        assert says == promised
    (message,), *others = (messages for *_, messages in found)
    assert f"{promised / 1e6:.3g} MB" in message
    assert f"block_policy={KINDS[kind].__name__}.block_policy(max_preconditioner_dim=4)" in message
    assert others == [[], []]  # the first rank speaks for all
    assert sum(sent for _, sent, _, _ in found) == promised


def test_bytes_are_twice_what_owners_do_not_hold():
    """(8, 8) on 3 ranks: rows 0-3, 3-6, 6-8; strips 0-4, 4-8. One row each way for the first, two for the second."""
    found = run_ranks(3, collectives_of, "shampoo", "shard", {"shapes": ((8, 8),)}, {"grad_norm": 1.0})
    assert found[0][2] == 2 * (8 + 2 * 8) * 4


def missing_and_bad(kind, layout):
    """A run in which gradients are missing for all, and not finite on one rank."""
    run = run_of(kind, layout).steps(0, 3)
    run.step(3, without=(0, 4))
    run.give(4)
    run.params[2].grad = torch.full_like(run.params[2], torch.nan)
    run.optimizer.step()
    return run.steps(5, 6).result(), run.optimizer.skipped_steps


@pytest.mark.parametrize("layout", ["planned", "shard"])
def test_missing_gradients_and_bad_ones_do_what_they_do_in_one_process(layout):
    single = run_of("shampoo").steps(0, 3)
    single.step(3, without=(0, 4))
    single.step(5)
    for result, skipped in run_ranks(3, missing_and_bad, "shampoo", layout):
        assert skipped == 1
        same(result, single.result())


ABSENT = {"shapes": ((9, 4), (6, 5))}


def absent_on_some(kind):
    """The second parameter's gradient is missing on ranks that hold some of it: it counts as zero there."""
    run = run_of(kind, "shard", **ABSENT)
    for number in range(4):
        run.step(number, without=(1,) if dist.get_rank() else (), grad_norm=1.0)
    return run.result()


def test_a_moving_gradient_that_is_missing_on_some_ranks_counts_as_zero_there():
    single = run_of("soap", **ABSENT)
    for number in range(4):
        single.give(number)
        assert single.params[1].grad is not None
        single.params[1].grad[2:] = 0  # what ranks 1 and 2 of 3 hold
        single.optimizer.step()
    for result in run_ranks(3, absent_on_some, "soap"):
        same(result, single.result())
