"""Inverse roots and eigenbases of many symmetric matrices at once, with fallbacks for failures.

    root of A:    X = (A + epsilon ||A||_F I)^-1/4, by LAPACK's or cuSOLVER's symmetric eigendecomposition A = Q L Q'

    A == 0, or too small      ->  the identity
    A not finite              ->  the last good root                       counted: kept
    eigh(A), checked          ->  residual within the tolerance: done
    else fp64 eigh, checked   ->  done                                     counted: fell_back
    else                      ->  the last good root                       counted: kept

The ridge is relative to the Frobenius norm, which is between the largest eigenvalue and sqrt(d) times it: a factor is
as well conditioned at 1e-30 as at 1e+30. All work is done on A / ||A||_F, with ridge r. The checked residual is the rms
of (L + r)^-1/2 (Q'AQ + r) (L + r)^-1/2 - I. A result does not depend on the other matrices of the batch.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import astuple, dataclass, field

import torch
from torch import Tensor

from block_optim.shampoo import linalg

TINY = 1e-30  # norm below which a factor counts as zero: squares of gradients below 1e-15
TOLERANCE = 0.05  # largest residual that is accepted
EXPONENT = 0.25  # of both roots: 1 / (2 * 2), for the two sides of a matrix


@dataclass
class RootCounts:
    """Counts of roots: computed, computed again in fp64, kept from before, of zero factors; `+=` adds up."""

    computed: int = 0
    fell_back: int = 0
    kept: int = 0
    zero: int = 0

    def __iadd__(self, other: "RootCounts") -> "RootCounts":
        return RootCounts(*map(operator.add, astuple(self), astuple(other)))


@dataclass
class Roots:
    """Results for a batch."""

    roots: Tensor  # (k, d, d)
    counts: RootCounts  # roots that were computed, retried, replaced or kept
    kept: list[int] = field(default_factory=list)  # positions of the matrices that keep the last result

    def without(self, padding: int) -> "Roots":
        """Take the zeros that fill up a batch on an accelerator out of the counts."""
        self.counts.computed -= padding
        self.counts.zero -= padding
        return self


def inverse_roots(factors: Tensor, epsilon: float, *, last: Tensor) -> Roots:
    """Inverse roots of (k, d, d) symmetric positive semidefinite matrices, fp32 or fp64; `last` where there is none.

    The ridge `epsilon` is relative to the Frobenius norm of a matrix.
    """
    scale, usable, unit = _normalised(factors)
    zero, eye = scale.isfinite() & ~usable, linalg.identity_like(factors)
    roots, residual = _eigh_roots(unit, epsilon)
    good = usable & (residual <= TOLERANCE) & _finite(roots)  # a NaN residual is not <=
    fates = usable, good, zero
    result = _settled(_where(zero, eye, roots), fates, last, lambda i: _exact_root(unit[i], epsilon))
    if result.kept:
        usable[result.kept] = False  # the last result is used as it is
    sizes = linalg.power(_where(usable, scale, torch.ones_like(scale))[:, None], -EXPONENT)
    return Roots(result.roots * sizes[:, :, None], result.counts, result.kept)


def _settled(
    results: Tensor,
    fates: tuple[Tensor, Tensor, Tensor],
    last: Tensor,
    exact: Callable[[int], Tensor | None],
) -> Roots:
    """Results, with those that are not good replaced by the module's table, in place; of zeros they are right already.

    `fates` are of each matrix whether it is finite, its result good, and it zero; `exact` is None where fp64 fails too.
    """
    counts, kept = RootCounts(computed=len(results)), list[int]()
    rows = torch.stack(fates).tolist()  # the only wait for the device
    for index, (is_finite, is_good, is_zero) in enumerate(zip(*rows, strict=True)):
        if is_good or is_zero:
            counts.zero += is_zero
        elif is_finite and (better := exact(index)) is not None:
            counts.fell_back += 1
            results[index] = better.to(results.dtype)
        else:
            counts.kept += 1
            kept.append(index)
            results[index] = last[index]
    return Roots(results, counts, kept)


def _normalised(factors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Norms, which of the matrices are usable (finite and not zero), and these at norm 1, the identity for others."""
    scale = linalg.norms(factors)
    usable = scale.isfinite() & (scale >= TINY)
    safe = _where(usable, scale, torch.ones_like(scale))[:, None, None]
    return scale, usable, _where(usable, factors / safe, linalg.identity_like(factors))


def eigenbases(factors: Tensor, last: Tensor) -> Roots:
    """Eigenvectors (k, d, d) of symmetric matrices, by descending eigenvalue: SOAP's first basis.

    `roots` of the result holds them; a zero matrix has the identity, one that is not finite keeps `last`.
    """
    scale, _, unit = _normalised(factors)
    _, vectors = linalg.eigh(unit)
    bases = vectors.flip(2).contiguous()
    return _checked_bases(bases, unit, scale, last)


def power_bases(factors: Tensor, last: Tensor) -> tuple[Roots, Tensor]:
    """One step of power iteration and QR from the last eigenbases: SOAP's refresh (arXiv 2409.11321).

    Returns:
        The new bases (as `eigenbases`) and `order` (k, d): which old column each new one comes from, by descending
        estimated eigenvalue; second moments along this dimension must be reordered by it.
    """
    scale, usable, unit = _normalised(factors)
    moved = linalg.matmul(unit, last)
    estimates = linalg.sums(last * moved, 1)
    order = torch.sort(estimates, dim=1, descending=True, stable=True).indices
    bases = linalg.qr(torch.gather(moved, 2, order[:, None, :].expand_as(moved)))
    result = _checked_bases(bases, unit, scale, last)
    stays = torch.arange(order.shape[1], device=order.device).expand_as(order)
    if result.kept:
        usable[result.kept] = False  # the last result is used as it is
    return result, torch.where(usable[:, None], order, stays)


def _checked_bases(bases: Tensor, unit: Tensor, scale: Tensor, last: Tensor) -> Roots:
    finite, zero = scale.isfinite(), scale.isfinite() & (scale < TINY)
    # Of zeros the last basis, or the identity if there is none.
    at_zero = _where(last.flatten(1).any(1), last, linalg.identity_like(last))

    def exact(index: int) -> Tensor | None:
        _, vectors = linalg.eigh(unit[index : index + 1].double())
        return vectors[0].flip(1) if bool(vectors.isfinite().all()) else None

    good = _finite(bases) & finite & ~zero
    return _settled(_where(zero, at_zero, bases), (finite, good, zero), last, exact)


def _eigh_roots(unit: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Roots (k, d, d) of matrices of unit norm, exactly symmetric, and their residuals (k,)."""
    values, basis = linalg.eigh(unit)
    values = values.clamp(min=0) + epsilon
    half = basis * linalg.power(values, -EXPONENT / 2)[:, None, :]
    root = linalg.matmul(half, half.mT)
    rotated = linalg.matmul(basis.mT, linalg.matmul(unit, basis))
    rotated.diagonal(dim1=1, dim2=2).add_(epsilon)
    inverse = values.sqrt().reciprocal()
    residual = rotated * inverse[:, :, None] * inverse[:, None, :] - linalg.identity_like(rotated)
    return (root + root.mT) / 2, linalg.norms(residual).div(math.sqrt(unit.shape[1]))


def _exact_root(unit: Tensor, epsilon: float) -> Tensor | None:
    """The root of one matrix by fp64 eigh; None if it does not pass its check."""
    root, residual = _eigh_roots(unit[None].double(), epsilon)
    passed = float(residual[0]) <= TOLERANCE and bool(root.isfinite().all())
    return root[0] if passed else None


def _where(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(mask.view(-1, *[1] * (yes.dim() - 1)), yes, no)


def _finite(batch: Tensor) -> Tensor:
    return batch.isfinite().flatten(1).all(1)
