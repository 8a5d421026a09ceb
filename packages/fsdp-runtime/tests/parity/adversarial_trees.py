"""Random small module trees with everything that is awkward about parameters, and a random way to shard each."""

import importlib
import random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from parity_runs import SYSTEMS

from ragged_shard.testing import rank_mesh

WIDTH = 7
SIZES = (1, 2, 3, 5, 11, 13)


class Node(nn.Module):
    """Maps (B, 7) to (B, 7): one operation with its parameters, then its children, some of them twice."""

    up: Any
    down: Any

    def __init__(self, rng: random.Random, depth: int, awkward: bool):
        super().__init__()
        kinds = ["linear", "experts", "norm", "vector", "none"] + ["scalar", "transposed"] * awkward
        self.kind = rng.choice(kinds)
        size = rng.choice(SIZES)
        if self.kind == "linear":
            self.up, self.down = nn.Linear(WIDTH, size, bias=rng.random() < 0.5), nn.Linear(size, WIDTH)
        elif self.kind == "experts":
            self.up = nn.Parameter(torch.randn(size, WIDTH, 2) / 3)
            self.down = nn.Parameter(torch.randn(size, 2, WIDTH) / 3)
        elif self.kind == "norm":
            self.norm = nn.LayerNorm(WIDTH)
            self.register_buffer("shift", torch.randn(WIDTH))
        elif self.kind == "vector":
            self.vector = nn.Parameter(torch.randn(WIDTH))
        elif self.kind == "scalar":
            self.scalar = nn.Parameter(torch.randn(()))
        elif self.kind == "transposed":
            self.matrix = nn.Parameter((torch.randn(WIDTH, size) / 3).t())
        if rng.random() < 0.25:
            self.unused = nn.Parameter(torch.randn(rng.choice(SIZES), 3))
        parts = rng.choice((0, 1, 2, 3)) if depth else 0
        self.parts = nn.ModuleList(Node(rng, depth - 1, awkward) for _ in range(parts))
        self.order = (
            [rng.randrange(len(self.parts)) for _ in range(len(self.parts) + 1)] if len(self.parts) else []
        )
        self.again = rng.random() < 0.3

    def forward(self, x):
        if self.kind == "linear":
            x = x + torch.tanh(self.down(torch.tanh(self.up(x))))
        elif self.kind == "experts":
            x = x + torch.tanh(torch.einsum("bw,ewk,ekv->bv", x, self.up, self.down))
        elif self.kind == "norm":
            x = self.norm(x) + self.shift
        elif self.kind == "vector":
            x = x + torch.tanh(x * self.vector)
        elif self.kind == "scalar":
            x = x + torch.tanh(x * self.scalar)
        elif self.kind == "transposed":
            x = x + torch.tanh(torch.tanh(x @ self.matrix.t()) @ self.matrix)
        for i in self.order if self.again else range(len(self.parts)):
            x = self.parts[i](x)
        return x


def tree(seed: int, awkward: bool) -> nn.Module:
    """The same on every rank: a root with embedding-like ends, some tied, some parameters frozen."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    root = Node(rng, 2, awkward)
    root.first, root.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    if rng.random() < 0.5:
        root.last.weight = root.first.weight
    for p in root.parameters():
        if rng.random() < 0.15:
            p.requires_grad_(False)
    return root


class Whole(nn.Module):
    """A tree between its ends, so that the root unit has parameters of its own."""

    def __init__(self, seed: int, awkward: bool):
        super().__init__()
        self.tree: Any = tree(seed, awkward)

    def forward(self, x):
        return self.tree.last(self.tree(self.tree.first(x)))


def shard(fsdp: Any, model: Whole, seed: int, awkward: bool) -> str:
    """Some nodes as units; children first unless awkward. Returns what was chosen, for messages."""
    rng = random.Random(seed + 1)
    ranks = dist.get_world_size()
    mesh = rank_mesh(ranks)
    nodes = [m for m in model.modules() if isinstance(m, Node) and m is not model.tree and rng.random() < 0.6]
    nodes = nodes[::-1]  # a parent comes before its children in modules()
    units = [*nodes, model]
    if awkward:
        rng.shuffle(units)
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": rng.choice((True, False, None))}
    blocks = "none"
    if hasattr(fsdp, "block_policies"):
        policies = fsdp.block_policies
        blocks, policy = rng.choice(
            [
                ("none", None),
                ("rows", policies.rows(4)),
                ("tiles", policies.tiles(3, 3)),
                ("whole", policies.whole()),
            ]
        )
        options["block_policy"] = policy
    for unit in units:
        fsdp.fully_shard(unit, **options)
    return f"seed {seed}: {len(units)} units, reshard {options['reshard_after_forward']}, blocks {blocks}"


def train(system: str, seed: int, awkward: bool) -> None:
    """Four steps beside one process: losses, gradients of every parameter, parameters."""
    fsdp = importlib.import_module(SYSTEMS[system])
    reference, model = Whole(seed, awkward), Whole(seed, awkward)
    what = shard(fsdp, model, seed, awkward)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.02) for m in (reference, model)]
    for step in range(4):
        whole = torch.randn(3 * ranks, WIDTH, generator=torch.Generator().manual_seed(step))
        wanted, found = reference(whole).square().mean(), model(whole.chunk(ranks)[rank]).square().mean()
        if wanted.requires_grad:
            wanted.backward()
            found.backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), f"{what}: {name}.grad of step {step}"
            if q.grad is not None:
                same(p.grad, q.grad, f"{what}: {name}.grad of step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = model.state_dict()
    assert state.keys() == reference.state_dict().keys(), what
    for name, p in reference.named_parameters():
        same(state[name], p.detach(), f"{what}: {name}")


def same(found: Any, wanted: torch.Tensor, what: str) -> None:
    whole = found.full_tensor()
    assert whole.shape == wanted.shape, what
    worst = (whole - wanted).abs().max().item() if wanted.numel() else 0.0
    assert worst <= 1e-5 * max(1.0, wanted.abs().max().item() if wanted.numel() else 1.0), (
        f"{what}: {worst:.1e} apart"
    )


def train_many(system: str, seeds: list[int], awkward: bool) -> None:
    for seed in seeds:
        train(system, seed, awkward)
