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

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from block_optim.core._torch_compat import foreach_add_, foreach_sub_
from block_optim.core.params import Group
from block_optim.shampoo import linalg
from block_optim.shampoo.base import StepBlocks, TensorStep, by_step
from block_optim.shampoo.batches import Batch, capacity, load_square, store_square
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
    """Roots of factors of one size, kind, step and set of options, of any tensors and sides."""

    step: int
    items: Sequence[tuple[OwnedBlock, str]]  # the blocks and sides

    def run(self) -> Roots:
        """Store the roots of the corrected factors; where one cannot be computed, keep the last one."""
        block, side = self.items[0]
        group, device = block.tensor.group, block.tensor.param.device
        count = capacity(len(self.items), block.dim(side), device)
        factors, last = (load_square(self.items, kind, count) for kind in ("factor", "root"))
        if (beta := beta2(group)) < 1:
            factors /= 1 - beta**self.step
        roots = diagonal_roots if block.diagonal(side) else inverse_roots
        result = roots(factors, group["root_epsilon"], last=last).without(count - len(self.items))
        store_square([block.views[f"root_{side}"] for block, side in self.items], result.roots)
        return result


def root_jobs(works: Sequence[TensorStep]) -> list[RootJob]:
    """All roots whose turn it is, equal sizes together."""
    classes: dict[tuple[Any, ...], list[tuple[OwnedBlock, str]]] = defaultdict(list)
    for group, step, members in by_step(works):
        for block in StepBlocks(members).blocks:
            if is_due(group, block.number, step):
                for side in SIDES:
                    how = group["root_epsilon"], beta2(group), block.tensor.compute, block.tensor.param.device
                    classes[step, block.dim(side), block.diagonal(side), how].append((block, side))
    return [
        RootJob(step, chunk)
        for (step, dim, *_), items in classes.items()
        for chunk in linalg.chunks(items, dim)
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
        return linalg.sums(squares, 2 if side == ROWS else 1)
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
