"""Inverse roots and eigenbases of many symmetric matrices at once, and what happens when one fails.

    root of A with exponent e:    X = (A + epsilon ||A||_F I)^-e

    A == 0, or too small      ->  the identity
    A not finite              ->  the last good root                       counted: kept
    method(A), checked        ->  residual within the tolerance: done
    else fp64 eigh, checked   ->  done                                     counted: fell_back
    else                      ->  the last good root                       counted: kept

The ridge is relative to the Frobenius norm, which is between the largest eigenvalue and sqrt(d) times it: a factor is
as well conditioned at 1e-30 as at 1e+30, and every method sees the same matrix. All work is done on A / ||A||_F.

| method | what it does | residual that is checked |
| --- | --- | --- |
| `eigh` | LAPACK's or cuSOLVER's symmetric eigendecomposition | rms of (L + r)^-1/2 (Q'AQ + r) (L + r)^-1/2 - I |
| `newton` | coupled Newton iteration, products only (arXiv 2002.09018, 2309.06497) | rms of X^p (A + r) - I |

A result does not depend on the other matrices of the batch: iterations stop for each matrix separately.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from block_optim.shampoo import linalg

TINY = 1e-30  # norm below which a factor counts as zero: squares of gradients below 1e-15
TOLERANCE = 0.05  # largest residual that is accepted
NEWTON_STEPS = 100
_NEWTON_DONE = 1e-5  # max |M - I| at which more Newton steps only add rounding


@dataclass(frozen=True)
class RootOptions:
    """How roots are computed.

    Args:
        exponent: e in A^-e.
        method: "eigh", or "newton", whose exponent must be one over an integer.
        epsilon: the ridge, relative to the Frobenius norm of the factor.

    Raises:
        ValueError: an unknown method, or a number that it cannot work with.
    """

    exponent: float
    method: str = "eigh"
    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        if self.method not in _METHODS:
            raise ValueError(f"root_method={self.method!r}: expected one of {', '.join(_METHODS)}")
        if not 0 < self.epsilon < 1:
            raise ValueError(
                f"root_epsilon={self.epsilon!r}: expected 0 < root_epsilon < 1, relative to a factor's norm; "
                "1e-5 is right for fp32"
            )
        if self.method == "newton" and abs(round(1 / self.exponent) - 1 / self.exponent) > 1e-9:
            raise ValueError(
                f"newton takes roots of integer order; exponent {self.exponent} is none of 1, 1/2, 1/3, ...: use "
                'root_method="eigh"'
            )


@dataclass
class RootCounts:
    """Numbers of matrices by what became of them; `+=` adds up."""

    computed: int = 0
    fell_back: int = 0
    kept: int = 0
    zero: int = 0

    def __iadd__(self, other: "RootCounts") -> "RootCounts":
        self.computed += other.computed
        self.fell_back += other.fell_back
        self.kept += other.kept
        self.zero += other.zero
        return self


@dataclass
class Roots:
    """Results for a batch.

    Attributes:
        roots: (k, d, d).
        counts: what became of the matrices.
        kept: the positions of those that keep the last result.
    """

    roots: Tensor
    counts: RootCounts
    kept: list[int] = field(default_factory=list)

    def without(self, padding: int) -> "Roots":
        """Take the zeros that fill up a batch on an accelerator out of the counts."""
        self.counts.computed -= padding
        self.counts.zero -= padding
        return self


def inverse_roots(factors: Tensor, options: RootOptions, *, last: Tensor) -> Roots:
    """Inverse roots of (k, d, d) symmetric positive semidefinite matrices, fp32 or fp64.

    Args:
        factors: the matrices.
        options: exponent, method and ridge.
        last: (k, d, d), kept where all methods fail.
    """
    scale, usable, unit = _normalised(factors)
    zero, eye = scale.isfinite() & ~usable, linalg.identity_like(factors)
    roots, residual = _METHODS[options.method](unit, options)
    good = usable & (residual <= TOLERANCE) & _finite(roots)  # a NaN residual is not <=
    counts = RootCounts(computed=len(factors))
    kept: list[int] = []
    fates = torch.stack([usable, good, zero]).tolist()  # the only wait for the device
    for index, (is_usable, is_good, is_zero) in enumerate(zip(*fates, strict=True)):
        if is_good:
            continue
        if is_zero:
            counts.zero += 1
            roots[index] = eye[index]
        elif is_usable and (exact := _exact_root(unit[index], options)) is not None:
            counts.fell_back += 1
            roots[index] = exact.to(roots.dtype)
        else:
            counts.kept += 1
            kept.append(index)
            roots[index] = last[index]
    scaled = usable.clone()
    if kept:
        scaled[kept] = False
    sizes = linalg.power(_where(scaled, scale, torch.ones_like(scale))[:, None], -options.exponent)
    return Roots(roots * sizes[:, :, None], counts, kept)


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
    estimates = linalg.col_sums(last * moved)
    order = torch.sort(estimates, dim=1, descending=True, stable=True).indices
    bases = linalg.qr(torch.gather(moved, 2, order[:, None, :].expand_as(moved)))
    result = _checked_bases(bases, unit, scale, last)
    stays = torch.arange(order.shape[1], device=order.device).expand_as(order)
    unchanged = torch.zeros(len(factors), dtype=torch.bool, device=order.device)
    unusable = [i for i, ok in enumerate(usable.tolist()) if not ok]
    if unusable or result.kept:
        unchanged[unusable + result.kept] = True
    return result, torch.where(unchanged[:, None], stays, order)


def _checked_bases(bases: Tensor, unit: Tensor, scale: Tensor, last: Tensor) -> Roots:
    counts = RootCounts(computed=len(bases))
    kept: list[int] = []
    zero = scale.isfinite() & (scale < TINY)
    good = _finite(bases) & scale.isfinite() & ~zero
    for index, (is_good, is_zero, is_finite) in enumerate(
        zip(*torch.stack([good, zero, scale.isfinite()]).tolist(), strict=True)
    ):
        if is_good:
            continue
        if is_zero:  # keep the previous basis, or the identity if there is none
            counts.zero += 1
            bases[index] = last[index] if bool(last[index].any()) else linalg.identity_like(last)[index]
            continue
        _, exact = linalg.eigh(unit[index : index + 1].double()) if is_finite else (None, None)
        if exact is not None and bool(exact.isfinite().all()):
            counts.fell_back += 1
            bases[index] = exact[0].flip(1).to(bases.dtype)
        else:
            counts.kept += 1
            kept.append(index)
            bases[index] = last[index]
    return Roots(bases, counts, kept)


# ---- the methods: (k, d, d) of unit norm -> roots, residuals (k,)

_Method = Callable[[Tensor, RootOptions], tuple[Tensor, Tensor]]


def _eigh_roots(unit: Tensor, options: RootOptions) -> tuple[Tensor, Tensor]:
    values, basis = linalg.eigh(unit)
    values = values.clamp(min=0) + options.epsilon
    return _from_basis(basis, values, options.exponent), _congruence_residual(unit, basis, values, options)


def _congruence_residual(unit: Tensor, basis: Tensor, values: Tensor, options: RootOptions) -> Tensor:
    """Rms of D^-1/2 Q'(A + r)Q D^-1/2 - I: what X^p (A + r) - I is in the eigenbasis, for any exponent."""
    rotated = linalg.matmul(basis.mT, linalg.matmul(unit, basis))
    rotated.diagonal(dim1=1, dim2=2).add_(options.epsilon)
    inverse = values.sqrt().reciprocal()
    return _rms_from_identity(rotated * inverse[:, :, None] * inverse[:, None, :])


def _newton_roots(unit: Tensor, options: RootOptions) -> tuple[Tensor, Tensor]:
    """X <- X T, M <- T^p M with T = ((p + 1) I - M) / p, until M is the identity; M = X^p (A + r) throughout."""
    order = round(1 / options.exponent)
    eye = linalg.identity_like(unit)
    ridged = unit + options.epsilon * eye
    # Converges from eigenvalues of M in (0, p + 1); ||A + r||_2 <= 1 + epsilon: half of that at most.
    start = (1 + order) / (2 * (1 + options.epsilon))
    root, mark = eye * start ** (1 / order), ridged * start
    error = _max_from_identity(mark)
    for _ in range(NEWTON_STEPS):
        running = error > _NEWTON_DONE
        if not bool(running.any()):
            break
        step = ((order + 1) * eye - mark) / order
        next_mark = linalg.matmul(_power(step, order), mark)
        next_error = _max_from_identity(next_mark)
        # Rounding takes over where an iteration no longer gains; the early ones may lose.
        running &= (next_error < error) | (error > 0.5)
        root = _where(running, linalg.matmul(root, step), root)
        mark = _where(running, next_mark, mark)
        error = _where(running, next_error, torch.zeros_like(error))
    root = (root + root.mT) / 2
    return root, _rms_from_identity(linalg.matmul(_power(root, order), ridged))


_METHODS: dict[str, _Method] = {"eigh": _eigh_roots, "newton": _newton_roots}


def _exact_root(unit: Tensor, options: RootOptions) -> Tensor | None:
    """The root of one matrix by fp64 eigh; None if it does not pass its check."""
    wide = unit[None].double()
    values, vectors = linalg.eigh(wide)
    values = values.clamp(min=0) + options.epsilon
    root = _from_basis(vectors, values, options.exponent)
    residual = _congruence_residual(wide, vectors, values, options)
    passed = float(residual[0]) <= TOLERANCE and bool(root.isfinite().all())
    return root[0] if passed else None


def _from_basis(basis: Tensor, values: Tensor, exponent: float) -> Tensor:
    """Q diag(values^-e) Q', exactly symmetric."""
    half = basis * linalg.power(values, -exponent / 2)[:, None, :]
    root = linalg.matmul(half, half.mT)
    return (root + root.mT) / 2


def _power(batch: Tensor, order: int) -> Tensor:
    """Matrix power by squaring; order >= 1."""
    result: Tensor | None = None
    while order:
        if order & 1:
            result = batch if result is None else linalg.matmul(result, batch)
        order >>= 1
        if order:
            batch = linalg.matmul(batch, batch)
    assert result is not None
    return result


def _where(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(mask.view(-1, *[1] * (yes.dim() - 1)), yes, no)


def _finite(batch: Tensor) -> Tensor:
    return batch.isfinite().flatten(1).all(1)


def _max_from_identity(batch: Tensor) -> Tensor:
    return (batch - linalg.identity_like(batch)).abs().flatten(1).amax(1)


def _rms_from_identity(batch: Tensor) -> Tensor:
    return linalg.norms(batch - linalg.identity_like(batch)).div(math.sqrt(batch.shape[1]))
