"""Small models and what the cases ask of them: nothing here knows which implementation it meets."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from runtime_helpers import assert_same_gradients, seeded
from runtime_helpers import assert_same_parameters as assert_same
from runtime_helpers import full as full
from torch.distributed.device_mesh import DeviceMesh

from ragged_shard.testing import rank_mesh

FULL_STATE_DICTS = (2, 12)  # torch's helpers for these take a RaggedDTensor for a DTensor from then on
WIDTH, HIDDEN = 8, 13  # 13: divides by no world size


class MLP(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN, bias: bool = True):
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Blocks and a head; ``seen`` gets what ``watch(block index)`` returns when a block computes."""

    def __init__(self, blocks: int = 3, width: int = WIDTH, hidden: int = HIDDEN):
        super().__init__()
        self.blocks: Any = nn.ModuleList(MLP(width, hidden) for _ in range(blocks))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def stack_of(block: Callable[[], nn.Module], blocks: int = 3) -> Stack:
    model = Stack()
    for i in range(blocks):
        model.blocks[i] = block()
    return model


class Tied(nn.Module):
    """A token model whose output layer is its embedding."""

    def __init__(self, vocabulary: int = 11, width: int = WIDTH):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.block = MLP(width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.output.weight = self.embed.weight

    def forward(self, tokens):
        return self.output(self.block(self.embed(tokens)))


def world() -> int:
    return dist.get_world_size()


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A CPU mesh; of all ranks in one dimension unless told."""
    return rank_mesh(*(shape or (world(),)), names=names)


def hsdp_mesh() -> DeviceMesh:
    return mesh(2, world() // 2, names=("replicate", "shard"))


def shard_stack(fsdp: Any, model: Any, **options: Any) -> Any:
    """Each block a unit, then the root, as users do."""
    options.setdefault("mesh", mesh())
    for block in model.blocks:
        fsdp.fully_shard(block, **options)
    fsdp.fully_shard(model, **options)
    return model


def pair(fsdp: Any, build: Callable[[], Any] = Stack, **options: Any) -> tuple[Any, Any]:
    """A sharded model, and the same one as it was."""
    return shard_stack(fsdp, seeded(build), **options), seeded(build)


def batch(step: int = 0, rows: int = 4, width: int = WIDTH) -> torch.Tensor:
    """The whole batch of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(rows * world(), width, generator=generator)


def mine(whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(world())[dist.get_rank()]


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, steps=2, rows=mine) -> None:
    for step in range(steps):
        mean_square(model, rows(batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    train(model, optimizer, steps, rows=lambda whole: whole)


def is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, "placements")


def all_sharded(model: nn.Module) -> bool:
    return all(is_sharded(p) for p in model.parameters())


def none_sharded(model: nn.Module) -> bool:
    return not any(is_sharded(p) for p in model.parameters())


def close(found: Any, wanted: Any, what: str, rtol: float = 1e-5, atol: float = 2e-6) -> None:
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def inputs(model: Any, reference: Any, step: int = 0) -> tuple[tuple[Any, torch.Tensor], ...]:
    """Both models, each with its rows of a step's batch: this rank's, and all of them."""
    whole = batch(step)
    return (model, mine(whole)), (reference, whole)


def backward_both(model: Any, reference: Any, step: int = 0) -> None:
    for one, x in inputs(model, reference, step):
        mean_square(one, x).backward()


def check_backward(model: nn.Module, reference: nn.Module, step: int = 0, **tolerance: float) -> None:
    """As `backward_both`, after which gradients are the same."""
    backward_both(model, reference, step)
    assert_same_gradients(model, reference, **tolerance)


def average(value: torch.Tensor) -> float:
    """Over ranks, in 64 bits."""
    total = value.detach().double().clone()
    dist.all_reduce(total)
    return total.item() / world()


def check_training(
    build, wrap, *, steps=3, loss=mean_square, batches=batch, optimizer=None, **tolerance
) -> Any:
    """Train the wrapped model on this rank's rows and an untouched twin on all of them: the same all the way."""
    make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
    reference, model = seeded(build), seeded(build)
    wrap(model)
    reference_optimizer, model_optimizer = make(reference.parameters()), make(model.parameters())
    for step in range(steps):
        whole = batches(step)
        wanted = loss(reference, whole)
        wanted.backward()
        found = loss(model, mine(whole))
        found.backward()
        close(
            torch.tensor(average(found), dtype=torch.float64),
            wanted.detach().double(),
            f"loss of step {step}",
            **tolerance,
        )
        assert_same_gradients(model, reference, **tolerance)
        for one in (reference_optimizer, model_optimizer):
            one.step()
            one.zero_grad()
    assert_same(model, reference, **tolerance)
    return model


def cross_entropy(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).float().flatten(0, -2), tokens.flatten())


def tokens(step: int = 0, rows: int = 4, length: int = 5, vocabulary: int = 11) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2000 + step)
    return torch.randint(vocabulary, (rows * world(), length), generator=generator)
