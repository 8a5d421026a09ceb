"""A root with a large embedding and a large head around its units: parts that are freed and reduced on their own."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fsdp_runtime
from ragged_shard.testing import rank_mesh

TOKENS, WIDTH = 70_000, 4  # more than a quarter of a million elements in each end


@dataclass(frozen=True)
class Ends:
    tied: bool = False
    frozen_embed: bool = False
    frozen_head: bool = False
    twice: bool = False  # the head is used before the blocks too
    functional: bool = False  # the output is made from the embedding's weight, outside its module
    recompute: bool = False
    sometimes: bool = False  # every other step leaves the head out
    late_bias: bool = False  # the head's bias is used in the last microbatch only
    chunks: bool = False  # the loss is taken in chunks, with backwards of their own
    microbatches: int = 1
    reshard: bool | None = None
    wrapped_first: bool = False  # the root is wrapped before its blocks


CASES = (
    Ends(), Ends(reshard=True), Ends(reshard=False, microbatches=3), Ends(tied=True),
    Ends(tied=True, microbatches=2, reshard=True), Ends(frozen_embed=True), Ends(frozen_head=True, reshard=True),
    Ends(twice=True), Ends(twice=True, frozen_head=True, microbatches=2), Ends(functional=True, reshard=True),
    Ends(recompute=True, reshard=True), Ends(recompute=True, twice=True, microbatches=2), Ends(sometimes=True),
    Ends(sometimes=True, microbatches=2, reshard=True), Ends(late_bias=True, microbatches=2, reshard=True),
    Ends(late_bias=True, microbatches=3), Ends(chunks=True), Ends(chunks=True, tied=True, microbatches=2),
    Ends(wrapped_first=True, reshard=True),
)  # fmt: skip


class Model(nn.Module):
    def __init__(self, ends: Ends):
        super().__init__()
        self.ends = ends
        self.bias = False
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=ends.late_bias)
        if ends.tied:
            self.head.weight = self.embed.weight
        self.embed.weight.requires_grad_(not ends.frozen_embed)
        if ends.frozen_head:
            self.head.weight.requires_grad_(False)

    def forward(self, tokens, with_head: bool = True):
        x = self.embed(tokens)
        early = self.head(x)[..., :9] if self.ends.twice else None
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.ends.recompute else block(x))
        x = self.norm(x)
        if self.ends.chunks or not with_head:
            return x
        weight = self.embed.weight if self.ends.functional else self.head.weight
        out = F.linear(x, weight, self.head.bias if self.bias else None)
        return out if early is None else torch.cat([out, early], -1)


def backward(model: Model, tokens: torch.Tensor, scale: float, with_head: bool) -> None:
    out = model(tokens, with_head)
    if not model.ends.chunks or not with_head:
        (out.square().mean() * scale).backward()
        return
    leaf = out.detach().requires_grad_()
    for part in leaf.chunk(2):
        (model.head(part).square().mean() * scale / 2).backward()
    out.backward(leaf.grad)


def train(ends: Ends) -> None:
    """Three steps beside one process, in 64 bits: sums over the vocabulary cancel."""
    torch.manual_seed(0)
    model: Any = Model(ends).double()
    torch.manual_seed(0)
    reference = Model(ends).double()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    options: dict = {"mesh": rank_mesh(ranks), "reshard_after_forward": ends.reshard}
    if ends.wrapped_first:
        fsdp_runtime.fully_shard(model, **options)
    for block in model.blocks:
        fsdp_runtime.fully_shard(block, **options)
    if ends.chunks and not ends.tied:
        fsdp_runtime.fully_shard([model.norm, model.head], **{**options, "reshard_after_forward": False})
    elif ends.chunks:  # embedding and head are one parameter: one unit
        fsdp_runtime.fully_shard([model.embed, model.head], **{**options, "reshard_after_forward": False})
    if not ends.wrapped_first:
        fsdp_runtime.fully_shard(model, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, reference)]
    for step in range(3):
        with_head = not (ends.sometimes and step == 1)
        for micro in range(ends.microbatches):
            whole = torch.randint(
                TOKENS, (2 * ranks, 3), generator=torch.Generator().manual_seed(7 * step + micro)
            )
            last = micro == ends.microbatches - 1
            model.set_requires_gradient_sync(last)
            model.bias = reference.bias = ends.late_bias and last
            backward(model, whole.chunk(ranks)[rank], 1.0, with_head)
            backward(reference, whole, 1.0, with_head)
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            what = f"{ends}: {name}.grad of step {step}"
            assert (p.grad is None) == (q.grad is None), what
            if q.grad is not None:
                torch.testing.assert_close(
                    p.grad.full_tensor(), q.grad, rtol=0, atol=1e-9 * q.grad.abs().max().item(), msg=what
                )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def train_all() -> None:
    for ends in CASES:
        train(ends)
