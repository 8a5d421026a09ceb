"""Shampoo's options where they depend on others, and its arithmetic on batches of blocks. No state, no communication.

When a block's turn comes, by its number, the step and the options, is the same at every world size:

    frequency 4, start 8, staggered; the block's phase is its number modulo 4

    step        1  2  3  4  5  6  7  8  9 10 11 12 13
    phase 0                       (8)           x
    phase 1              x           x              x        a quarter of the blocks in each step
    phase 2                 x           x
    phase 3                    x           x
                                  ^ start: every block has a root by now

    not staggered: all blocks at 8, 12, 16 ...
"""

import torch
from torch import Tensor

from block_optim.core._torch_compat import foreach_add_, foreach_sub_
from block_optim.core.params import Group
from block_optim.shampoo import linalg
from block_optim.shampoo.batches import Batch
from block_optim.shampoo.plan import COLS, ROWS, Size, TensorPlan
from block_optim.shampoo.roots import TINY, RootOptions

GRAFTING = ("none", "rmsprop", "adam")


def root_options(group: Group) -> RootOptions:
    """Exponent, method and ridge of a group's roots. Raises ValueError if they do not fit each other."""
    exponent, epsilon = group["exponent"], group["root_epsilon"]
    if exponent is None:  # by order: 1 / (2 * 2) for matrices, and 1/2 for KL, whose factors are covariances
        exponent = 0.5 if group["kl"] else 0.25
    if epsilon is None:
        epsilon = 1e-3 if group["kl"] else 1e-5
    return RootOptions(float(exponent), group["root_method"], epsilon)


def beta1(group: Group) -> float:
    """Decay of the filtered gradient."""
    return float(group["betas"][0])


def beta2(group: Group) -> float:
    """Decay of the factors; 1 for sums."""
    return float(group["betas"][1])


def second_beta(group: Group) -> float:
    """Decay of elementwise second moments."""
    if group["grafting_beta2"] is not None:
        return float(group["grafting_beta2"])
    return beta2(group) if beta2(group) < 1 or group["grafting"] == "none" else 0.999


def first_preconditioned(group: Group) -> int:
    """The first step that preconditions."""
    start: int | None = group["start_preconditioning_step"]
    return group["precondition_frequency"] if start is None else start


def first_due(group: Group, number: int) -> int:
    """The first step at which a block's roots are computed, by its number.

    Staggered: in its phase, within the `precondition_frequency` steps up to the first preconditioned one; at that one
    if this is before step 1.
    """
    start = first_preconditioned(group)
    step = start - (start - number) % group["precondition_frequency"]
    return step if group["stagger"] and step >= 1 else start


def is_due(group: Group, number: int, step: int) -> bool:
    """Whether a block's roots are computed in this step (counted from 1)."""
    first = first_due(group, number)
    if step <= first:
        return step == first
    phase = number if group["stagger"] else first_preconditioned(group)
    return bool((step - phase) % group["precondition_frequency"] == 0)


def side_states(tensor: TensorPlan, kind: str, packed: bool, diagonal: bool = True) -> dict[str, Size]:
    """States of one kind; without `diagonal` only for the sides whose factors are full."""

    def size_of(side: str, is_diagonal: bool) -> Size:
        def size(rows: int, cols: int) -> int:
            dim = rows if side == ROWS else cols
            return dim if is_diagonal else linalg.packed_numel(dim, packed)

        return size

    grid = tensor.grid_of_blocks
    sides = {ROWS: grid.diagonal_rows, COLS: grid.diagonal_cols}
    return {f"{kind}_{side}": size_of(side, d) for side, d in sides.items() if diagonal or not d}


# ---- arithmetic


def outer(grads: Tensor, side: str, diagonal: bool) -> Tensor:
    """G G' or G'G, or its diagonal."""
    if diagonal:
        squares = grads * grads
        return linalg.row_sums(squares) if side == ROWS else linalg.col_sums(squares)
    return linalg.matmul(grads, grads.mT) if side == ROWS else linalg.matmul(grads.mT, grads)


def apply_side(values: Tensor, matrix: Tensor, side: str) -> Tensor:
    """Multiply (k, m, n) by (k, d, d) or a diagonal (k, d) from the left (rows) or from the right (cols)."""
    if matrix.dim() == 2:
        return values * (matrix[:, :, None] if side == ROWS else matrix[:, None, :])
    return linalg.matmul(matrix, values) if side == ROWS else linalg.matmul(values, matrix)


def whitened(group: Group, step: int, batch: Batch, grads: Tensor) -> dict[str, Tensor]:
    """The gradient for each factor: whitened on the other side by S^-1/2.

    Until a block has roots, the other factor counts as isotropic, of the size that makes both equal:
    S = sqrt(mean G^2) I.
    """
    ready = [step > first_due(group, block.number) for block in batch.blocks]
    result = {}
    for side, other in ((ROWS, COLS), (COLS, ROWS)):
        result[side] = apply_side(grads, batch.side("root", other, group["packed"]), other)
    if not all(ready):
        rms = linalg.norms(grads) / (batch.rows * batch.cols) ** 0.5
        scale = torch.where(rms > TINY, rms, torch.ones_like(rms)).sqrt().reciprocal()
        plain = grads * scale[:, None, None]
        padded = [*ready, *[True] * (batch.capacity - len(ready))]
        mask = torch.tensor(padded, device=grads.device)[:, None, None]
        result = {side: torch.where(mask, values, plain) for side, values in result.items()}
    return result


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
    if step < first_preconditioned(group):
        return torch.zeros_like(filtered) if graft is None else graft
    result = apply_side(filtered, batch.side("root", ROWS, group["packed"]), ROWS)
    result = apply_side(result, batch.side("root", COLS, group["packed"]), COLS)
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
