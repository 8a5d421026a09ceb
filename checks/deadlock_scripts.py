"""Short training scripts in which FSDP2 hangs, raises or is wrong, for `deadlocks.py`. Each is run with FSDP2 and ours.

A script trains `Net` for three steps; what it does to go wrong is in `forward` or `step`. `plain` trains the same in
one process, with the mean of all ranks' losses.
"""

import random
import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as fsdp2_shard
from torch.nn.utils import clip_grad_norm_

import fsdp_runtime
from fsdp_runtime.token_loss import TokenLoss

STEPS, WIDTH = 3, 8
PAUSE = 7.0  # seconds; longer than ranks wait before they compare what they wait for
Expected = Literal["right", "raises", "hangs"]
SCRIPTS: "dict[str, type[Script]]" = {}


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.offset = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, shifts: bool = True) -> Tensor:
        x = x + self.offset if shifts else x
        return self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Three residual blocks, the second larger than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden) for hidden in (16, 24, 16))
        self.first, self.last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(
        self, x: Tensor, order: Iterable[int] = (0, 1, 2), unused: Iterable[int] = (), shifts: bool = True
    ) -> Tensor:
        x = self.first(x)
        for index in order:
            out = self.blocks[index](x, shifts)
            x = x if index in unused else x + out
        return self.last(x)


def inputs(rank: int, step: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


class Script:
    """A script without a fault.

    Attributes:
        title: what the user does.
        sources: who met it.
        expected: of ours, on every rank.
    """

    title: ClassVar[str]
    sources: ClassVar[str] = ""
    expected: ClassVar[Expected]
    skippable: ClassVar[bool] = False  # whether ours declares the blocks so; FSDP2 knows no such option
    decay: ClassVar[float] = 0.0

    def __init_subclass__(cls) -> None:
        SCRIPTS[cls.__name__] = cls

    def __init__(self, system: str) -> None:
        self.system = system
        torch.manual_seed(0)
        self.net: Any = self.build()
        self.rank = self.world = 0

    def build(self) -> nn.Module:
        return Net()

    def plain(self, world: int) -> dict[str, Tensor]:
        self.world = world
        self.optimizer = self.optimizer_of()
        for step in range(STEPS):
            losses = [self.loss(rank, step) for rank in range(world)]
            torch.stack([loss for loss in losses if loss is not None]).sum().div(world).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.net.state_dict()

    def optimizer_of(self) -> torch.optim.Optimizer:
        """SGD, or AdamW where weight decay shows which gradients are missing."""
        if self.decay:
            return torch.optim.AdamW(self.net.parameters(), lr=0.01, weight_decay=self.decay)
        return torch.optim.SGD(self.net.parameters(), lr=0.05)

    def sharded(self, mesh: DeviceMesh) -> dict[str, Any]:
        self.mesh, self.rank, self.world = mesh, mesh.get_rank(), mesh.size()
        self.wrap()
        self.optimizer = self.optimizer_of()
        for step in range(STEPS):
            self.step(step)
        return self.net.state_dict()

    def shard(self, module: nn.Module, **options: Any) -> Any:
        call: Callable[..., Any] = fsdp_runtime.fully_shard if self.system == "ours" else fsdp2_shard
        return call(module, mesh=self.mesh, **options)

    def wrap(self) -> None:
        options = {"skippable": True} if self.skippable and self.system == "ours" else {}
        for block in self.net.blocks:
            self.shard(block, **options)
        self.shard(self.net)

    def loss(self, rank: int, step: int) -> Tensor | None:
        return self.net(inputs(rank, step), **self.run(rank, step)).square().mean()

    def run(self, rank: int, step: int) -> dict[str, Any]:
        return {}

    def step(self, step: int) -> None:
        loss = self.loss(self.rank, step)
        if loss is not None:
            loss.backward()
        self.update()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def is_odd(self, step: int) -> bool:
        """Whether this is the rank and the step at which one rank does something else."""
        return step == 1 and self.rank == self.world - 1


class skipped(Script):
    title = "a rank skips a block in a step; ours: `skippable=True`"
    sources = "torchtitan#4777, miles#2406"
    expected: ClassVar[Expected] = "right"
    skippable = True

    def run(self, rank: int, step: int) -> dict[str, Any]:
        return {"order": (0, 2) if rank == self.world - 1 and step else (0, 1, 2)}


class skipped_undeclared(skipped):
    title = "the same, not declared"
    expected: ClassVar[Expected] = "raises"
    skippable = False


class random_depth(Script):
    title = "stochastic depth, drawn on each rank; ours: `skippable=True`"
    sources = "Automodel#2763"
    expected, skippable = "right", True

    def run(self, rank: int, step: int) -> dict[str, Any]:
        draw = random.Random(10 * step + rank)
        return {"order": [index for index in range(3) if draw.random() < 0.6]}


class unused_output(Script):
    title = "a rank does not use a block's output; ours: `skippable=True`"
    sources = "transformers#37186"
    expected, skippable = "right", True

    def run(self, rank: int, step: int) -> dict[str, Any]:
        return {"unused": (1,) if rank == self.world - 1 and step == 1 else ()}


class used_by_one(Script):
    title = "parameters that one rank uses"
    expected, decay = "right", 0.1

    def run(self, rank: int, step: int) -> dict[str, Any]:
        return {"shifts": rank == 0}


class used_by_none(Script):
    title = "parameters that no rank uses"
    expected, decay = "right", 0.1

    def run(self, rank: int, step: int) -> dict[str, Any]:
        return {"shifts": step != 1}


class built_late(Script):
    title = "optimizer built after an evaluation"
    expected = "right"

    def optimizer_of(self) -> torch.optim.Optimizer:
        with torch.no_grad():
            self.loss(self.rank, 0)
        return super().optimizer_of()


class cleared_late(Script):
    title = "`model.zero_grad()` after an evaluation"
    expected = "right"

    def update(self) -> None:
        self.optimizer.step()
        with torch.no_grad():
            self.net(inputs(0, 0))
        self.net.zero_grad()


class no_backward(Script):
    title = "a rank skips a backward"
    expected = "raises"

    def step(self, step: int) -> None:
        loss = self.loss(self.rank, step)
        if loss is not None and not self.is_odd(step):
            loss.backward()
        self.update()


class caught(Script):
    title = "a rank catches an out-of-memory error and continues"
    expected = "raises"

    def step(self, step: int) -> None:
        if self.is_odd(step):
            handle = self.net.blocks[1].up.register_forward_pre_hook(self._fail)
            try:
                self.loss(self.rank, step)
            except torch.OutOfMemoryError:
                handle.remove()
        super().step(step)

    @staticmethod
    def _fail(*_: Any) -> None:
        raise torch.OutOfMemoryError


class evaluation(Script):
    title = "one rank evaluates alone"
    sources = "pytorch#139016"
    expected = "raises"

    def step(self, step: int) -> None:
        super().step(step)
        if self.is_odd(step):
            with torch.no_grad():
                self.net(inputs(self.rank, step))


class another_order(Script):
    title = "a rank runs blocks in another order"
    expected = "raises"

    def run(self, rank: int, step: int) -> dict[str, Any]:
        return {"order": (0, 2, 1) if self.is_odd(step) else (0, 1, 2)}


class frozen(Script):
    title = "a rank freezes a parameter"
    expected = "raises"

    def wrap(self) -> None:
        if self.rank == self.world - 1:
            self.net.blocks[1].up.weight.requires_grad_(False)
        super().wrap()


class accumulating(Script):
    title = "a rank has `set_requires_gradient_sync(False)`"
    expected = "raises"

    def step(self, step: int) -> None:
        self.net.set_requires_gradient_sync(not self.is_odd(step))
        super().step(step)


class tied(Script):
    title = "a parameter tied across two units"
    sources = "accelerate#4171, #3870, Model-Optimizer#2059, Automodel#2213"
    expected = "right"

    def build(self) -> nn.Module:
        net = Net()
        net.last.weight = net.first.weight
        return net

    def wrap(self) -> None:
        self.shard(self.net.first)
        self.shard(self.net.last)
        super().wrap()


class tied_late(tied):
    title = "tied after sharding"
    sources = "accelerate#3870"
    expected = "right"

    def wrap(self) -> None:
        Script.wrap(self)
        self.net.last.weight = self.net.first.weight


class tokens(Script):
    title = "ranks have different numbers of tokens; ours: `TokenLoss`"
    sources = "miles#3231, verl#5625, Megatron-LM#5956"
    expected = "right"

    def rows(self, rank: int) -> int:
        return 2 + 5 * rank

    def token_losses(self, rank: int, step: int) -> Tensor:
        return self.net(inputs(rank, step, self.rows(rank))).square().mean(1).sum()

    def loss(self, rank: int, step: int) -> Tensor | None:
        total = sum(map(self.rows, range(self.world)))
        return self.token_losses(rank, step) * (self.world / total)  # `plain` divides by the number of ranks

    def wrap(self) -> None:
        super().wrap()
        if self.system == "ours":
            self.counts = TokenLoss(self.net)

    def step(self, step: int) -> None:
        if self.system == "ours":
            counted = self.counts.step([self.rows(self.rank)])
            counted.loss(self.token_losses(self.rank, step)).backward()
        else:
            (self.token_losses(self.rank, step) / self.rows(self.rank)).backward()
        self.update()


class fewer_batches(Script):
    title = "a rank has one batch less"
    sources = "pytorch#174126"
    expected = "hangs"

    def step(self, step: int) -> None:
        if step < STEPS - 1 or self.rank < self.world - 1:
            super().step(step)


class saving(Script):
    title = "one rank saves alone"
    expected = "hangs"

    def step(self, step: int) -> None:
        super().step(step)
        if self.is_odd(step):
            for param in self.net.parameters():
                param.full_tensor()


class clipping(Script):
    title = "one rank clips alone"
    expected = "hangs"

    def update(self) -> None:
        if self.rank == self.world - 1:
            norm = clip_grad_norm_(self.net.parameters(), 1.0)
            getattr(norm, "full_tensor", lambda: norm)()
        super().update()


class stopped(Script):
    title = "a rank stops for some seconds"
    expected = "right"

    def step(self, step: int) -> None:
        if self.is_odd(step):
            time.sleep(PAUSE)
        super().step(step)
