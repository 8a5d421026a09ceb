"""Dying ranks, wrong arguments."""

import contextlib
import os
import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from runtime_helpers import loss_of, seeded, shard, step_of, tokens
from torch.distributed.device_mesh import DeviceMesh

import fsdp_runtime
from layout_planner import Rows, Tile
from ragged_shard.testing import RankError, on_ranks, rank_mesh, run_ranks

pytestmark = pytest.mark.long


def dies(how: str, limit: float) -> None:
    """Rank 1 leaves, or sleeps for good, before the third unit's gather; the others raise, and say where."""
    group = dist.new_group(timeout=timedelta(seconds=limit))
    model = shard(seeded(blocks=4), mesh=DeviceMesh.from_group(group, "cpu"))
    loss_of(model, tokens()).backward()

    def leave(module, args):
        if dist.get_rank() == 1:
            if how == "dies":
                os._exit(3)
            time.sleep(600)  # the pool ends it, once the others have failed

    model.blocks[2].register_forward_pre_hook(leave, prepend=True)
    for step in range(3):
        loss_of(model, tokens(step)).backward()
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize(("how", "limit"), [("dies", 1000.0), ("sleeps", 3.0)])
def test_when_a_rank_is_gone_the_others_fail_in_time_and_name_collective_and_unit(
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
def test_wrong_arguments_are_refused_on_every_rank_naming_parameter_and_value() -> None:
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
    model = shard(seeded())
    step_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    other(torch.ones(1, 3)).sum().backward()
    before = other.weight.detach().clone()
    elsewhere.step()
    assert not torch.equal(other.weight, before)
    ignoring = seeded()
    kept = list(ignoring.norm.parameters())
    optimizer = torch.optim.SGD(kept, lr=0.1)
    step_of(wrap(ignoring, ignored_params=set(kept)), optimizer)


def many_short_lives(rounds: int = 12) -> list[int]:
    """Threads and file descriptors after models that came and went."""
    found = []
    for _ in range(rounds):
        loss_of(shard(seeded()), tokens()).backward()
        with contextlib.suppress(FileNotFoundError):
            found.append(len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task")))
    return found


def test_models_that_come_and_go_leave_no_threads_and_no_files() -> None:
    for counts in run_ranks(2, many_short_lives):
        assert counts[2:] == [counts[-1]] * len(counts[2:]), counts
