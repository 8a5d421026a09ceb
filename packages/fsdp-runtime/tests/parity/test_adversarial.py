"""Awkward models, failing passes, dying ranks, wrong arguments."""

import contextlib
import os
import random
import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from adversarial_ends import train_all
from adversarial_trees import train_many
from random_programs import check_programs, check_races
from runtime_helpers import assert_same_parameters
from torch.distributed.device_mesh import DeviceMesh

import fsdp_runtime
from layout_planner import Rows, Tile
from ragged_shard.testing import RankError, on_ranks, rank_mesh, run_ranks

pytestmark = pytest.mark.long


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_random_trees_train_as_in_one_process_whatever_the_parameters_and_the_order_of_wrapping(
    ranks,
) -> None:
    run_ranks(ranks, train_many, "ours", list(range(100 * ranks, 100 * ranks + 12)), True, timeout=240)


def test_the_random_trees_that_fsdp2_can_shard_train_the_same_under_it() -> None:
    for system in ("fsdp2", "ours"):
        run_ranks(3, train_many, system, list(range(12)), False, timeout=240)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_programs_have_the_values_of_one_process(ranks: int) -> None:
    run_ranks(ranks, check_programs, list(range(100 * ranks, 100 * ranks + 40)), timeout=240)


@pytest.mark.filterwarnings("ignore:.*returned a view")
def test_random_programs_use_no_memory_without_an_order() -> None:
    for seed in range(100):
        check_races(seed)


@pytest.mark.parametrize("ranks", [2, 3])
def test_large_ends_around_units_train_as_in_one_process_however_they_are_used(ranks: int) -> None:
    run_ranks(ranks, train_all, timeout=240)


class Fuse(torch.autograd.Function):
    """Identity that raises in forward or in backward."""

    @staticmethod
    def forward(ctx, x, where):
        ctx.where = where
        if where == "forward":
            raise OSError("on purpose")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.where == "backward":
            raise OSError("on purpose")
        return gradient, None


class Chain(nn.Module):
    """Blocks of which one fails when told to; its root has parameters before and after them."""

    def __init__(self, blocks: int = 4):
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 7)) for _ in range(blocks)
        )
        self.last = nn.Linear(7, 3)
        self.fail: tuple[int, str] | None = None

    def forward(self, x):
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            x = x + block(x)
            if self.fail is not None and self.fail[0] == i:
                x = Fuse.apply(x, self.fail[1])
        return self.last(x)


def chain(seed: int = 0) -> Chain:
    torch.manual_seed(seed)
    return Chain()


def shard(model: Chain, mesh: DeviceMesh | None = None, **options) -> Any:
    over = mesh or rank_mesh()
    for block in model.blocks:
        fsdp_runtime.fully_shard(block, mesh=over, **options)
    return fsdp_runtime.fully_shard(model, mesh=over, **options)


def whole_batch(step: int) -> torch.Tensor:
    return torch.randn(2 * dist.get_world_size(), 7, generator=torch.Generator().manual_seed(step))


def step_of(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def survives(seed: int) -> None:
    """Failures at random places, each with or without a reset, between good steps: never a trace of them."""
    rng = random.Random(seed)
    model, reference = shard(chain(), reshard_after_forward=rng.choice((True, False, None))), chain()
    rows = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, reference)]
    history = []
    for step in range(8):
        if rng.random() < 0.5:
            model.fail = (rng.randrange(4), rng.choice(("forward", "backward")))
            resets = rng.random() < 0.5
            history.append((*model.fail, resets))
            with pytest.raises(OSError, match="on purpose"):
                step_of(model, whole_batch(99)[rows])
            model.fail = None
            if resets:
                model.reset_iter_state()
                assert all(hasattr(p, "placements") for p in model.parameters()), history
            for p in model.parameters():
                p.grad = None
        step_of(model, whole_batch(step)[rows])
        step_of(reference, whole_batch(step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(model, reference, what=f"seed {seed}, step {step} after {history}: ")


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks", timeout=240)
def test_a_pass_that_raises_leaves_no_trace_in_the_next_step_with_or_without_a_reset(ranks: int) -> None:
    for seed in range(8):
        survives(seed)


@on_ranks(2)
def test_an_evaluation_that_raises_leaves_no_trace() -> None:
    model, reference = shard(chain()), chain()
    for _ in range(3):
        model.fail = (2, "forward")
        with torch.no_grad(), pytest.raises(OSError, match="on purpose"):
            model(whole_batch(0))
        model.fail = None
        with torch.no_grad():
            torch.testing.assert_close(model(whole_batch(1)), reference(whole_batch(1)))


def dies(how: str, limit: float) -> None:
    """Rank 1 leaves, or sleeps for good, before the third unit's gather; the others raise, and say where."""
    group = dist.new_group(timeout=timedelta(seconds=limit))
    model = shard(chain(), DeviceMesh.from_group(group, "cpu"))
    step_of(model, whole_batch(0)[:2])

    def leave(module, args):
        if dist.get_rank() == 1:
            if how == "dies":
                os._exit(3)
            time.sleep(600)  # the pool ends it, once the others have failed

    model.blocks[2].register_forward_pre_hook(leave, prepend=True)
    for step in range(3):
        step_of(model, whole_batch(step)[:2])
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize(("how", "limit"), [("dies", 1000.0), ("sleeps", 3.0)])
def test_when_a_rank_is_gone_the_others_fail_in_time_and_say_in_which_collective_of_which_unit(
    how: str, limit: float
) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(3, dies, how, limit)
    assert caught.value.causes, caught.value
    for message in map(str, caught.value.causes.values()):
        assert re.search(r"blocks\.\d", message), message
        assert re.search(r"(?i)all.?gather|reduce.?scatter", message), message


class Odd(nn.Module):
    def __init__(self, odd: nn.Parameter):
        super().__init__()
        self.fine = nn.Linear(3, 3)
        self.odd = odd


def wrap(module: Any = None, **options: Any) -> Any:
    return fsdp_runtime.fully_shard(module or nn.Linear(30, 30), **{"mesh": rank_mesh(), **options})


# What is refused at wrap time, and what the message says; each gets the number of the rank.
REFUSED: list[tuple[Any, str]] = [
    (
        lambda rank: wrap(block_policy=lambda name, p: 3 if name == "weight" else None),
        "ValueError: .*weight.*3",
    ),
    (lambda rank: wrap(block_policy=lambda name, p: Tile(2, 2)), "ValueError: .*bias"),
    (lambda rank: wrap(block_policy=Rows(2)), "(TypeError|ValueError): .*block_policy"),
    (lambda rank: wrap(block_policy=lambda name, p: 1 // 0), "ZeroDivisionError|ValueError: .*weight"),
    (
        lambda rank: wrap(Odd(nn.Parameter(torch.ones(2, dtype=torch.complex64)))),
        "(TypeError|ValueError): .*odd.*complex64",
    ),
    (lambda rank: wrap(Odd(nn.Parameter(torch.ones(2 + rank)))), "ValueError: .*odd"),
    (lambda rank: wrap(block_policy=lambda name, p: Rows(2 + rank)), "ValueError: .*(weight|bias)"),
    (lambda rank: wrap(mp_policy=torch.bfloat16), "(TypeError|ValueError): .*mp_policy"),
    (lambda rank: wrap(mesh=dist.group.WORLD), "(TypeError|ValueError): .*mesh"),
    (lambda rank: wrap(ignored_params={"weight"}), "(TypeError|ValueError): .*ignored_params"),
]


@on_ranks(2)
def test_wrong_arguments_are_refused_at_wrap_time_on_every_rank_naming_parameter_and_value() -> None:
    for attempt, wanted in REFUSED:
        message = "no error"
        try:
            attempt(dist.get_rank())
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        assert re.match(wanted, message, re.DOTALL), (wanted, message)


@on_ranks(2)
def test_optimizers_of_other_and_of_ignored_parameters_step_as_ever() -> None:
    other = nn.Linear(3, 3)
    elsewhere = torch.optim.SGD(other.parameters(), lr=0.1)
    model = shard(chain())
    good = torch.optim.SGD(model.parameters(), lr=0.1)
    step_of(model, whole_batch(0))
    good.step()
    other(torch.ones(1, 3)).sum().backward()
    before = other.weight.detach().clone()
    elsewhere.step()
    assert not torch.equal(other.weight, before)
    ignoring = chain()
    kept: list = [ignoring.first.weight, ignoring.first.bias]
    optimizer = torch.optim.SGD(kept, lr=0.1)
    fsdp_runtime.fully_shard(ignoring, ignored_params=set(kept), mesh=rank_mesh())
    step_of(ignoring, whole_batch(0))
    optimizer.step()


def many_short_lives(rounds: int = 12) -> list[int]:
    """Threads and file descriptors after models that came and went."""
    found = []
    for _ in range(rounds):
        model = shard(chain())
        step_of(model, whole_batch(0)[:2])
        with contextlib.suppress(FileNotFoundError):
            found.append(len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task")))
    return found


def test_models_that_come_and_go_leave_no_threads_and_no_files() -> None:
    for counts in run_ranks(2, many_short_lives):
        assert counts[2:] == [counts[-1]] * len(counts[2:]), counts
