"""Shampoo's options in force, and its arithmetic on batches of equal blocks. No state, no communication."""

import torch
from torch import Tensor

from block_optim.core._torch_compat import foreach_add_, foreach_sub_
from block_optim.core.params import Group
from block_optim.shampoo import linalg
from block_optim.shampoo.batches import Batch
from block_optim.shampoo.plan import COLS, ROWS, Size, TensorPlan
from block_optim.shampoo.roots import TINY, RootOptions
from block_optim.shampoo.schedule import first_due


def root_options(group: Group) -> RootOptions:
    """The root options of a group."""
    epsilon = group["root_epsilon"]
    if epsilon is None:
        epsilon = 1e-3 if group["kl"] else 1e-5
    return RootOptions(group["root_method"], epsilon, group["root_tolerance"], group["root_iterations"])


def exponent_of(group: Group) -> float:
    """Of the roots: given, or by order: 1 / (2 * 2) for matrices, and 1/2 for KL, whose factors are covariances."""
    if group["exponent"] is not None:
        return float(group["exponent"])
    return 0.5 if group["kl"] else 0.25


def start_of(group: Group) -> int:
    """The first step that preconditions."""
    if group["start_preconditioning_step"] is not None:
        return int(group["start_preconditioning_step"])
    return int(group["precondition_frequency"])


def second_beta(group: Group) -> float:
    """Decay of elementwise second moments."""
    if group["grafting"] == "none":
        return float(group["betas"][1])
    if group["grafting"] == "adagrad":
        return 1.0
    if group["grafting_beta2"] is not None:
        return float(group["grafting_beta2"])
    return float(group["betas"][1]) if group["betas"][1] < 1 else 0.999


def block_states(tensor: TensorPlan) -> dict[str, Size]:
    """Names of the states of Shampoo's blocks, and their sizes."""
    packed = tensor.group["packed"]
    found = side_states(tensor, "factor", packed) | side_states(tensor, "root", packed)
    if root_options(tensor.group).keeps_basis:
        found |= side_states(tensor, "basis", False, diagonal=False)
    return found


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
    """The gradient as each factor gets it: whitened on the other side by S^-1/2.

    Until a block has roots, the other factor counts as isotropic, of the size that makes both alike:
    S = sqrt(mean G^2) I.
    """
    start, frequency = start_of(group), group["precondition_frequency"]
    ready = [step > first_due(b.number, start, frequency, group["stagger"]) for b in batch.blocks]
    found = {}
    for side, other in ((ROWS, COLS), (COLS, ROWS)):
        found[side] = apply_side(grads, batch.side("root", other, group["packed"]), other)
    if not all(ready):
        rms = linalg.norms(grads) / (batch.rows * batch.cols) ** 0.5
        scale = torch.where(rms > TINY, rms, torch.ones_like(rms)).sqrt().reciprocal()
        plain = grads * scale[:, None, None]
        mask = torch.tensor([*ready, *[True] * (batch.capacity - len(ready))], device=grads.device)[
            :, None, None
        ]
        found = {side: torch.where(mask, values, plain) for side, values in found.items()}
    return found


def _graft(group: Group, step: int, filtered: Tensor, second: Tensor | None) -> Tensor:
    """The grafting method's own direction; `filtered` is corrected for bias already."""
    if second is None:
        return filtered
    if group["grafting"] == "adam":
        second = second / (1 - second_beta(group) ** step)
    return filtered / second.sqrt().add_(group["eps"])


def direction(group: Group, step: int, batch: Batch, filtered: Tensor) -> Tensor:
    """The update of a batch of blocks, up to the learning rate."""
    beta, packed = group["betas"][0], group["packed"]
    if beta > 0:
        filtered = filtered / (1 - beta**step)
    grafting = group["grafting"] != "none"
    second = batch.state("exp_avg_sq") if "exp_avg_sq" in batch.blocks[0].views else None
    graft = _graft(group, step, filtered, second) if grafting else None
    if step < start_of(group):
        return torch.zeros_like(filtered) if graft is None else graft
    found = apply_side(filtered, batch.side("root", ROWS, packed), ROWS)
    found = apply_side(found, batch.side("root", COLS, packed), COLS)
    if graft is not None:
        size = linalg.norms(found)
        ratio = torch.where(size > 0, linalg.norms(graft) / size, torch.zeros_like(size))
        found = found * ratio[:, None, None]
    return found


def elementwise_direction(group: Group, step: int, filtered: Tensor, second: Tensor | None) -> Tensor:
    """The update of a tensor without matrices: the grafting method's, or the diagonal preconditioner's."""
    if group["betas"][0] > 0:
        filtered = filtered / (1 - group["betas"][0] ** step)
    if group["grafting"] != "none":
        return _graft(group, step, filtered, second)
    assert second is not None
    beta = group["betas"][1]
    if beta < 1:
        second = second / (1 - beta**step)
    return filtered / second.sqrt().add_(group["eps"])


def take(weights: list[Tensor], updates: list[Tensor], lr: float | Tensor) -> None:
    """W -= lr D. A tensor lr is not waited for."""
    if isinstance(lr, Tensor):
        foreach_sub_(weights, [u * lr.to(u.device) for u in updates])
    else:
        foreach_add_(weights, updates, alpha=-lr)
