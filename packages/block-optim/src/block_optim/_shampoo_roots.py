"""Which roots are due in a step, in batches over the whole model, and how one batch is computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from block_optim import _precond_math as pm
from block_optim._precond_base import Work
from block_optim._precond_plan import SIDES, Block, load_square, room
from block_optim._precond_schedule import first_due, is_due
from block_optim._roots import TINY, RootCounts, Roots, inverse_roots
from block_optim._shampoo_rule import exponent_of, root_options, start_of


@dataclass
class RootJob:
    """Roots of factors of one size and kind, whichever tensors and sides they belong to."""

    group: dict[str, Any]
    step: int
    items: Sequence[tuple[Block, str]]
    dim: int
    diagonal: bool
    first: bool

    def views(self, kind: str) -> list[Tensor]:
        return [block.views[f"{kind}_{side}"] for block, side in self.items]

    def load(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Copies of what the roots are made from: corrected factors, last roots, last bases."""
        packed, compute = self.group["packed"], self.items[0][0].tensor.compute
        count = room(len(self.items), pm.chunk_size(self.dim, self.dim), self.views("factor")[0].device)
        factors = load_square(self.views("factor"), self.dim, self.diagonal, packed, count, compute)
        beta = self.group["betas"][1]
        if beta < 1:
            factors /= 1 - beta**self.step
        last = load_square(self.views("root"), self.dim, self.diagonal, packed, count, compute)
        basis = None
        if root_options(self.group).keeps_basis and not self.diagonal:
            basis = load_square(self.views("basis"), self.dim, False, False, count, compute)
        return factors, last, basis

    def run(self, inputs: tuple[Tensor, Tensor, Tensor | None]) -> Roots:
        """The roots of loaded factors; touches nothing else."""
        factors, last, basis = inputs
        options, exponent = root_options(self.group), exponent_of(self.group)
        if self.diagonal:
            found = diagonal_roots(factors, exponent, options.epsilon, last)
        else:
            found = inverse_roots(factors, exponent, options, last=last, last_basis=basis)
        behind = len(factors) - len(self.items)  # zeros behind the blocks of a batch on CUDA
        found.counts.computed -= behind
        found.counts.zero -= behind
        return found


def root_jobs(works: Sequence[Work]) -> list[RootJob]:
    """All roots whose turn it is, equal sizes together."""
    classes: dict[Any, list[tuple[Block, str]]] = {}
    known: dict[Any, tuple[dict[str, Any], int]] = {}
    for work in works:
        group, step = work.group, work.step
        if work.tensor.grid is None:
            continue
        start, frequency, stagger = start_of(group), group["precondition_frequency"], group["stagger"]
        for block in work.tensor.blocks:
            if not is_due(step, block.number, start, frequency, stagger):
                continue
            first = step == first_due(block.number, start, frequency, stagger)
            for side in SIDES:
                key = (id(group), step, block.dim(side), block.diagonal(side), first, work.tensor.compute)
                classes.setdefault((*key, work.tensor.param.device), []).append((block, side))
                known[(*key, work.tensor.param.device)] = (group, step)
    return [
        RootJob(*known[key], part, dim=key[2], diagonal=key[3], first=key[4])
        for key, items in classes.items()
        for part in pm.chunks(items, pm.chunk_size(key[2], key[2]))
    ]


def diagonal_roots(factors: Tensor, exponent: float, epsilon: float, last: Tensor) -> Roots:
    """Inverse roots of diagonal factors (k, d), by the rules for full ones."""
    scale = pm.norms(factors[:, None])
    finite, zero = scale.isfinite(), scale.isfinite() & (scale < TINY)
    unit = factors / torch.where(finite & ~zero, scale, torch.ones_like(scale))[:, None]
    sizes = pm.power(torch.where(finite & ~zero, scale, torch.ones_like(scale))[:, None], -exponent)
    found = pm.power(unit.clamp(min=0) + epsilon, -exponent) * sizes
    found = torch.where(zero[:, None], torch.ones_like(found), torch.where(finite[:, None], found, last))
    kept = [i for i, ok in enumerate(finite.tolist()) if not ok]
    counts = RootCounts(len(factors), 0, len(kept), int(zero.sum()))
    return Roots(found, None, counts, kept)
