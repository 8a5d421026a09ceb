"""Shampoo's options in force, and its arithmetic on batches of equal blocks. No state, no communication.

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

from dataclasses import dataclass

import torch
from torch import Tensor

from block_optim.core._torch_compat import foreach_add_, foreach_sub_
from block_optim.core.params import Group
from block_optim.shampoo import linalg
from block_optim.shampoo.batches import Batch
from block_optim.shampoo.plan import COLS, ROWS, Size, TensorPlan
from block_optim.shampoo.roots import TINY, RootOptions

GRAFTING = ("none", "rmsprop", "adam")


@dataclass(frozen=True)
class ShampooOptions:
    """The options of a parameter group in force: defaults that depend on others are filled in.

    Attributes:
        beta1: decay of the filtered gradient.
        beta2: decay of the factors; 1 for sums.
        second_beta: decay of elementwise second moments.
        start: the first step that preconditions.
        frequency: steps between two computations of a block's roots.
        root: exponent, method and ridge of the roots.
    """

    beta1: float
    beta2: float
    second_beta: float
    eps: float
    grafting: str
    kl: bool
    start: int
    frequency: int
    stagger: bool
    overlap: bool
    packed: bool
    root: RootOptions

    @classmethod
    def of(cls, group: Group) -> "ShampooOptions":
        """Raises ValueError if root options do not fit each other."""
        beta1, beta2 = map(float, group["betas"])
        kl, grafting, frequency = group["kl"], group["grafting"], group["precondition_frequency"]
        second_beta = group["grafting_beta2"]
        if second_beta is None:
            second_beta = beta2 if beta2 < 1 or grafting == "none" else 0.999
        start = group["start_preconditioning_step"]
        exponent = group["exponent"]
        if (
            exponent is None
        ):  # by order: 1 / (2 * 2) for matrices, and 1/2 for KL, whose factors are covariances
            exponent = 0.5 if kl else 0.25
        epsilon = group["root_epsilon"]
        if epsilon is None:
            epsilon = 1e-3 if kl else 1e-5
        return cls(
            beta1=beta1,
            beta2=beta2,
            second_beta=float(second_beta),
            eps=group["eps"],
            grafting=grafting,
            kl=kl,
            start=frequency if start is None else start,
            frequency=frequency,
            stagger=group["stagger"],
            overlap=group["overlap"],
            packed=group["packed"],
            root=RootOptions(float(exponent), group["root_method"], epsilon),
        )

    def first_due(self, number: int) -> int:
        """The first step at which a block's roots are computed, by its number.

        Staggered: in its phase, within the `frequency` steps up to `start`; at `start` if that is before step 1.
        """
        step = self.start - (self.start - number) % self.frequency
        return step if self.stagger and step >= 1 else self.start

    def is_due(self, number: int, step: int) -> bool:
        """Whether a block's roots are computed in this step (counted from 1)."""
        first = self.first_due(number)
        if step <= first:
            return step == first
        return (step - (number if self.stagger else self.start)) % self.frequency == 0


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


def whitened(options: ShampooOptions, step: int, batch: Batch, grads: Tensor) -> dict[str, Tensor]:
    """The gradient for each factor: whitened on the other side by S^-1/2.

    Until a block has roots, the other factor counts as isotropic, of the size that makes both equal:
    S = sqrt(mean G^2) I.
    """
    ready = [step > options.first_due(block.number) for block in batch.blocks]
    result = {}
    for side, other in ((ROWS, COLS), (COLS, ROWS)):
        result[side] = apply_side(grads, batch.side("root", other, options.packed), other)
    if not all(ready):
        rms = linalg.norms(grads) / (batch.rows * batch.cols) ** 0.5
        scale = torch.where(rms > TINY, rms, torch.ones_like(rms)).sqrt().reciprocal()
        plain = grads * scale[:, None, None]
        padded = [*ready, *[True] * (batch.capacity - len(ready))]
        mask = torch.tensor(padded, device=grads.device)[:, None, None]
        result = {side: torch.where(mask, values, plain) for side, values in result.items()}
    return result


def _graft(options: ShampooOptions, step: int, filtered: Tensor, second: Tensor) -> Tensor:
    """The grafting method's direction; `filtered` is corrected for bias already."""
    if options.grafting == "adam":
        second = second / (1 - options.second_beta**step)
    return filtered / second.sqrt().add_(options.eps)


def direction(options: ShampooOptions, step: int, batch: Batch, filtered: Tensor) -> Tensor:
    """The update of a batch of blocks, without the learning rate."""
    if options.beta1 > 0:
        filtered = filtered / (1 - options.beta1**step)
    grafting = options.grafting != "none"
    graft = _graft(options, step, filtered, batch.state("exp_avg_sq")) if grafting else None
    if step < options.start:
        return torch.zeros_like(filtered) if graft is None else graft
    result = apply_side(filtered, batch.side("root", ROWS, options.packed), ROWS)
    result = apply_side(result, batch.side("root", COLS, options.packed), COLS)
    if graft is not None:
        size = linalg.norms(result)
        ratio = torch.where(size > 0, linalg.norms(graft) / size, torch.zeros_like(size))
        result = result * ratio[:, None, None]
    return result


def elementwise_direction(options: ShampooOptions, step: int, filtered: Tensor, second: Tensor) -> Tensor:
    """The update of a tensor without matrices: the grafting method's, or the diagonal preconditioner's."""
    if options.beta1 > 0:
        filtered = filtered / (1 - options.beta1**step)
    if options.grafting != "none":
        return _graft(options, step, filtered, second)
    if options.beta2 < 1:
        second = second / (1 - options.beta2**step)
    return filtered / second.sqrt().add_(options.eps)


def take(weights: list[Tensor], updates: list[Tensor], lr: float | Tensor) -> None:
    """W -= lr D. A tensor lr is not waited for."""
    if isinstance(lr, Tensor):
        foreach_sub_(weights, [u * lr.to(u.device) for u in updates])
    else:
        foreach_add_(weights, updates, alpha=-lr)
