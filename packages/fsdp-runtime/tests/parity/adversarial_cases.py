"""What goes wrong while a model trains, and what must hold then. For fsdp_runtime alone."""

import contextlib
import os
import random
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from runtime_helpers import assert_same_parameters
from torch.distributed.device_mesh import DeviceMesh

import fsdp_runtime
from layout_planner import Rows, Tile
from ragged_shard.testing import rank_mesh


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


def survive_many(seeds: list[int]) -> None:
    for seed in seeds:
        survives(seed)


def evaluation_fails() -> None:
    """A forward without gradients that raises leaves nothing unsharded behind the next one."""
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


class Odd(nn.Module):
    def __init__(self, odd: nn.Parameter):
        super().__init__()
        self.fine = nn.Linear(3, 3)
        self.odd = odd


def refused_at_wrap_time() -> dict[str, str]:
    """Messages of everything that `fully_shard` must refuse at once."""
    mesh = rank_mesh()
    rank = dist.get_rank()
    wrap: Any = fsdp_runtime.fully_shard
    attempts = {
        "policy gives a number": lambda: wrap(
            nn.Linear(3, 3), mesh=mesh, block_policy=lambda name, p: 3 if name == "weight" else None
        ),
        "policy gives a tile for a vector": lambda: wrap(
            nn.Linear(3, 3), mesh=mesh, block_policy=lambda name, p: Tile(2, 2)
        ),
        "policy is no function": lambda: wrap(nn.Linear(3, 3), mesh=mesh, block_policy=Rows(2)),
        "policy raises": lambda: wrap(nn.Linear(3, 3), mesh=mesh, block_policy=lambda name, p: 1 // 0),
        "complex": lambda: wrap(Odd(nn.Parameter(torch.ones(2, dtype=torch.complex64))), mesh=mesh),
        "ranks differ": lambda: wrap(Odd(nn.Parameter(torch.ones(2 + rank))), mesh=mesh),
        "policies differ": lambda: wrap(
            nn.Linear(30, 30), mesh=mesh, block_policy=lambda name, p: Rows(2 + rank)
        ),
        "precision": lambda: wrap(nn.Linear(3, 3), mesh=mesh, mp_policy=torch.bfloat16),
        "mesh": lambda: wrap(nn.Linear(3, 3), mesh=dist.group.WORLD),
        "ignored": lambda: wrap(nn.Linear(3, 3), mesh=mesh, ignored_params={"weight"}),
    }
    found = {}
    for name, attempt in attempts.items():
        found[name] = "nothing"
        try:
            attempt()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def optimizers_that_stay_quiet() -> None:
    """Right ones, ones of other models and ones of ignored parameters step as ever."""
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
