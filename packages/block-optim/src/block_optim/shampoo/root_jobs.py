"""Which roots are due in a step, in batches over the whole model, and how one batch is computed."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from block_optim.core.params import Group
from block_optim.shampoo import linalg
from block_optim.shampoo.base import Work
from block_optim.shampoo.batches import capacity, load_square
from block_optim.shampoo.plan import SIDES, OwnedBlock
from block_optim.shampoo.roots import TINY, RootCounts, Roots, inverse_roots
from block_optim.shampoo.rule import exponent_of, root_options, start_of
from block_optim.shampoo.schedule import first_due, is_due


@dataclass
class RootJob:
    """Roots of factors of one size and kind, whichever tensors and sides they belong to.

    Attributes:
        items: the blocks and sides.
        dim: size of the factors.
        diagonal: whether they are diagonal.
        first: whether these are the blocks' first roots.
    """

    group: Group
    step: int
    items: Sequence[tuple[OwnedBlock, str]]
    dim: int
    diagonal: bool
    first: bool

    def views(self, kind: str) -> list[Tensor]:
        """The blocks' states of a kind: "factor", "root" or "basis"."""
        return [block.views[f"{kind}_{side}"] for block, side in self.items]

    @property
    def written(self) -> list[Tensor]:
        """The states that results are put into."""
        kinds = ("root", "basis")
        return [b.views[f"{k}_{side}"] for b, side in self.items for k in kinds if f"{k}_{side}" in b.views]

    def load(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Copies of what the roots are made from: corrected factors, last roots, last bases."""
        packed, compute = self.group["packed"], self.items[0][0].tensor.compute
        count = capacity(
            len(self.items), linalg.chunk_size(self.dim, self.dim), self.views("factor")[0].device
        )
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
        return found.without(len(factors) - len(self.items))


def root_jobs(works: Sequence[Work]) -> list[RootJob]:
    """All roots whose turn it is, equal sizes together."""
    classes: dict[tuple[object, ...], list[tuple[Work, OwnedBlock, str, bool]]] = defaultdict(list)
    for work in works:
        tensor, group, step = work.tensor, work.tensor.group, work.step
        if tensor.grid is None:
            continue
        start, frequency, stagger = start_of(group), group["precondition_frequency"], group["stagger"]
        for block in tensor.blocks:
            if not is_due(step, block.number, start, frequency, stagger):
                continue
            first = step == first_due(block.number, start, frequency, stagger)
            for side in SIDES:
                kind = (block.dim(side), block.diagonal(side), first, tensor.compute, tensor.param.device)
                classes[id(group), step, *kind].append((work, block, side, first))
    jobs = []
    for members in classes.values():
        work, block, side, first = members[0]
        dim, diagonal = block.dim(side), block.diagonal(side)
        items = [(block, side) for _, block, side, _ in members]
        jobs += [
            RootJob(work.tensor.group, work.step, chunk, dim, diagonal, first)
            for chunk in linalg.chunks(items, linalg.chunk_size(dim, dim))
        ]
    return jobs


def diagonal_roots(factors: Tensor, exponent: float, epsilon: float, last: Tensor) -> Roots:
    """Inverse roots of diagonal factors (k, d), by the rules for full ones."""
    scale = linalg.norms(factors[:, None])
    finite, zero = scale.isfinite(), scale.isfinite() & (scale < TINY)
    unit = factors / torch.where(finite & ~zero, scale, torch.ones_like(scale))[:, None]
    sizes = linalg.power(torch.where(finite & ~zero, scale, torch.ones_like(scale))[:, None], -exponent)
    found = linalg.power(unit.clamp(min=0) + epsilon, -exponent) * sizes
    found = torch.where(zero[:, None], torch.ones_like(found), torch.where(finite[:, None], found, last))
    kept = [i for i, ok in enumerate(finite.tolist()) if not ok]
    counts = RootCounts(len(factors), 0, len(kept), int(zero.sum()))
    return Roots(found, None, counts, kept)
