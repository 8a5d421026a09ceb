"""Which roots are due in a step, in batches over the whole model, and how one batch is computed."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from block_optim.core.params import Group
from block_optim.shampoo import linalg
from block_optim.shampoo.base import StepBlocks, TensorStep, by_step
from block_optim.shampoo.batches import capacity, load_square
from block_optim.shampoo.plan import SIDES, OwnedBlock
from block_optim.shampoo.roots import TINY, RootCounts, RootOptions, Roots, inverse_roots
from block_optim.shampoo.rule import beta2, is_due, root_options


@dataclass
class RootJob:
    """Roots of factors of one size and kind, of any tensors and sides.

    Attributes:
        group: a parameter group with their options.
        items: the blocks and sides.
        dim: size of the factors.
        diagonal: whether they are diagonal.
    """

    group: Group
    root: RootOptions
    step: int
    dim: int
    diagonal: bool
    items: Sequence[tuple[OwnedBlock, str]] = ()

    def views(self, kind: str) -> list[Tensor]:
        """The blocks' states of a kind: "factor" or "root"."""
        return [block.views[f"{kind}_{side}"] for block, side in self.items]

    def load(self) -> tuple[Tensor, Tensor]:
        """Copies of the corrected factors and the last roots."""
        packed, compute = self.group["packed"], self.items[0][0].tensor.compute
        count = capacity(
            len(self.items), linalg.chunk_size(self.dim, self.dim), self.views("factor")[0].device
        )
        factors = load_square(self.views("factor"), self.dim, self.diagonal, packed, count, compute)
        if (beta := beta2(self.group)) < 1:
            factors /= 1 - beta**self.step
        last = load_square(self.views("root"), self.dim, self.diagonal, packed, count, compute)
        return factors, last

    def run(self, inputs: tuple[Tensor, Tensor]) -> Roots:
        """The roots of loaded factors; writes nothing else."""
        factors, last = inputs
        compute = diagonal_roots if self.diagonal else inverse_roots
        return compute(factors, self.root, last=last).without(len(factors) - len(self.items))


def root_jobs(works: Sequence[TensorStep]) -> list[RootJob]:
    """All roots whose turn it is, equal sizes together."""
    classes: dict[Hashable, tuple[RootJob, list[tuple[OwnedBlock, str]]]] = {}
    for group, step, members in by_step(works):
        root, how = root_options(group), (beta2(group), group["packed"])
        for block in StepBlocks(members).blocks:
            if is_due(group, block.number, step):
                for side in SIDES:
                    kind = step, block.dim(side), block.diagonal(side)
                    memory = block.tensor.compute, block.tensor.param.device
                    job = RootJob(group, root, *kind)
                    classes.setdefault((root, how, kind, memory), (job, []))[1].append((block, side))
    return [
        replace(job, items=chunk)
        for job, items in classes.values()
        for chunk in linalg.chunks(items, linalg.chunk_size(job.dim, job.dim))
    ]


def diagonal_roots(factors: Tensor, options: RootOptions, *, last: Tensor) -> Roots:
    """Inverse roots of diagonal factors (k, d), by the rules for full ones."""
    scale = linalg.norms(factors[:, None])
    finite, zero = scale.isfinite(), scale.isfinite() & (scale < TINY)
    safe = torch.where(finite & ~zero, scale, torch.ones_like(scale))[:, None]
    unit, sizes = factors / safe, linalg.power(safe, -options.exponent)
    result = linalg.power(unit.clamp(min=0) + options.epsilon, -options.exponent) * sizes
    result = torch.where(zero[:, None], torch.ones_like(result), torch.where(finite[:, None], result, last))
    kept = [i for i, ok in enumerate(finite.tolist()) if not ok]
    return Roots(result, RootCounts(len(factors), 0, len(kept), int(zero.sum())), kept)
