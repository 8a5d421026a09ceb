"""Which roots are due in a step, and Shampoo's arithmetic on batches of blocks. No state, no communication.

When a block's turn comes, by its number, the step and the options, is the same at every world size:

    frequency 4; the block's phase is its number modulo 4

    step        1  2  3  4  5  6  7  8  9
    phase 0              x           x
    phase 1     x           x           x        a quarter of the blocks in each step
    phase 2        x           x
    phase 3           x           x
                         ^ the first preconditioned step: every block has a root
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from block_optim.core._torch_compat import foreach_add_, foreach_sub_
from block_optim.core.params import Group
from block_optim.shampoo import linalg
from block_optim.shampoo.base import StepBlocks, TensorStep, by_step
from block_optim.shampoo.batches import Batch, capacity, load_square
from block_optim.shampoo.plan import COLS, ROWS, SIDES, OwnedBlock
from block_optim.shampoo.roots import EXPONENT, TINY, RootCounts, Roots, inverse_roots

GRAFTING = ("none", "rmsprop", "adam")


def beta1(group: Group) -> float:
    """Decay of the filtered gradient."""
    return float(group["betas"][0])


def beta2(group: Group) -> float:
    """Decay of the factors; 1 for sums."""
    return float(group["betas"][1])


def second_beta(group: Group) -> float:
    """Decay of elementwise second moments."""
    return beta2(group) if beta2(group) < 1 or group["grafting"] == "none" else 0.999


def is_due(group: Group, number: int, step: int) -> bool:
    """Whether the roots or bases of a block with this number are computed in this step (counted from 1)."""
    return bool((step - number) % group["precondition_frequency"] == 0)


# ---- roots


@dataclass
class RootJob:
    """Roots of factors of one size and kind, of any tensors and sides."""

    group: Group  # a parameter group with their options
    step: int  # their step number
    dim: int  # size of the factors
    diagonal: bool  # whether they are diagonal
    items: Sequence[tuple[OwnedBlock, str]] = ()  # the blocks and sides

    def views(self, kind: str) -> list[Tensor]:
        """The blocks' states of a kind: "factor" or "root"."""
        return [block.views[f"{kind}_{side}"] for block, side in self.items]

    def run(self) -> Roots:
        """The roots of the corrected factors; where one cannot be computed, the last one."""
        size = linalg.chunk_size(self.dim, self.dim)
        count = capacity(len(self.items), size, self.views("factor")[0].device)
        compute = self.items[0][0].tensor.compute
        factors, last = (
            load_square(self.views(kind), self.dim, self.diagonal, count, compute)
            for kind in ("factor", "root")
        )
        if (beta := beta2(self.group)) < 1:
            factors /= 1 - beta**self.step
        roots = diagonal_roots if self.diagonal else inverse_roots
        return roots(factors, self.group["root_epsilon"], last=last).without(len(factors) - len(self.items))


def root_jobs(works: Sequence[TensorStep]) -> list[RootJob]:
    """All roots whose turn it is, equal sizes together."""
    classes: dict[Hashable, tuple[RootJob, list[tuple[OwnedBlock, str]]]] = {}
    for group, step, members in by_step(works):
        for block in StepBlocks(members).blocks:
            if is_due(group, block.number, step):
                for side in SIDES:
                    kind = step, block.dim(side), block.diagonal(side)
                    how = group["root_epsilon"], beta2(group), block.tensor.compute, block.tensor.param.device
                    classes.setdefault((how, kind), (RootJob(group, *kind), []))[1].append((block, side))
    return [
        replace(job, items=chunk)
        for job, items in classes.values()
        for chunk in linalg.chunks(items, linalg.chunk_size(job.dim, job.dim))
    ]


def diagonal_roots(factors: Tensor, epsilon: float, *, last: Tensor) -> Roots:
    """Inverse roots of diagonal factors (k, d), by the rules for full ones."""
    scale = linalg.norms(factors[:, None])
    finite, zero = scale.isfinite(), scale.isfinite() & (scale < TINY)
    safe = torch.where(finite & ~zero, scale, torch.ones_like(scale))[:, None]
    unit, sizes = factors / safe, linalg.power(safe, -EXPONENT)
    result = linalg.power(unit.clamp(min=0) + epsilon, -EXPONENT) * sizes
    result = torch.where(zero[:, None], torch.ones_like(result), torch.where(finite[:, None], result, last))
    kept = [i for i, ok in enumerate(finite.tolist()) if not ok]
    return Roots(result, RootCounts(len(factors), 0, len(kept), int(zero.sum())), kept)


# ---- arithmetic


def outer(grads: Tensor, side: str, diagonal: bool) -> Tensor:
    """G G' or G'G, or its diagonal."""
    if diagonal:
        squares = grads * grads
        return linalg.row_sums(squares) if side == ROWS else linalg.col_sums(squares)
    product = linalg.matmul(grads, grads.mT) if side == ROWS else linalg.matmul(grads.mT, grads)
    return product.tril() + product.tril(-1).mT  # exactly symmetric, which a product is not


def apply_side(values: Tensor, matrix: Tensor, side: str) -> Tensor:
    """Multiply (k, m, n) by (k, d, d) or a diagonal (k, d) from the left (rows) or from the right (cols)."""
    if matrix.dim() == 2:
        return values * (matrix[:, :, None] if side == ROWS else matrix[:, None, :])
    return linalg.matmul(matrix, values) if side == ROWS else linalg.matmul(values, matrix)


def _graft(group: Group, step: int, filtered: Tensor, second: Tensor) -> Tensor:
    """The grafting method's direction; `filtered` is corrected for bias already."""
    if group["grafting"] == "adam":
        second = second / (1 - second_beta(group) ** step)
    return filtered / second.sqrt().add_(group["eps"])


def direction(group: Group, step: int, batch: Batch, filtered: Tensor) -> Tensor:
    """The update of a batch of blocks, without the learning rate."""
    if (beta := beta1(group)) > 0:
        filtered = filtered / (1 - beta**step)
    grafting = group["grafting"] != "none"
    graft = _graft(group, step, filtered, batch.state("exp_avg_sq")) if grafting else None
    if step < group["precondition_frequency"]:
        return torch.zeros_like(filtered) if graft is None else graft
    result = apply_side(filtered, batch.side("root", ROWS), ROWS)
    result = apply_side(result, batch.side("root", COLS), COLS)
    if graft is not None:
        size = linalg.norms(result)
        ratio = torch.where(size > 0, linalg.norms(graft) / size, torch.zeros_like(size))
        result = result * ratio[:, None, None]
    return result


def elementwise_direction(group: Group, step: int, filtered: Tensor, second: Tensor) -> Tensor:
    """The update of a tensor without matrices: the grafting method's, or the diagonal preconditioner's."""
    if (beta := beta1(group)) > 0:
        filtered = filtered / (1 - beta**step)
    if group["grafting"] != "none":
        return _graft(group, step, filtered, second)
    if (beta := beta2(group)) < 1:
        second = second / (1 - beta**step)
    return filtered / second.sqrt().add_(group["eps"])


def take(weights: list[Tensor], updates: list[Tensor], lr: float | Tensor) -> None:
    """W -= lr D. A tensor lr is not waited for."""
    if isinstance(lr, Tensor):
        foreach_sub_(weights, [u * lr.to(u.device) for u in updates])
    else:
        foreach_add_(weights, updates, alpha=-lr)
