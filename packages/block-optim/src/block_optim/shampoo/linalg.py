"""Batched matrix arithmetic whose bits do not depend on how many matrices are in the batch.

A rank works on the blocks it owns, and their number changes with the world size. So:

    CPU    one BLAS or LAPACK call for each matrix, every operand on a 64-byte boundary: MKL's result for a matrix of
           odd size changes with its address, and a sum over a large one with the number of its neighbours;
           powers one row at a time, since vector code and the scalar code for the rest differ in an ulp
    else   one batched call over a number of matrices that depends on their size alone, filled up where there are
           fewer (which kernel cuBLAS and cuSOLVER choose depends on the batch)
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ragged_shard.device import is_cpu

T = TypeVar("T")
_LinAlgError: type[Exception] = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # public, but not re-exported

_ALIGN = 16  # elements of 4 bytes: one cache line
_CHUNK_ELEMENTS = 1 << 22


def chunk_size(dim: int) -> int:
    """How many matrices of this size are worked on at once: bounds temporary memory, and fixes the batch on CUDA."""
    return max(1, min(64, _CHUNK_ELEMENTS // dim**2))


def chunks(items: Sequence[T], dim: int) -> Iterator[Sequence[T]]:
    """Consecutive items, each with a matrix of this size, as many as are worked on at once."""
    size = chunk_size(dim)
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]


def empty_batch(count: int, rows: int, cols: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for `count` matrices (count, rows, cols), each beginning on a 64-byte boundary."""
    stride = -(-rows * cols // _ALIGN) * _ALIGN
    return torch.empty(count, stride, dtype=dtype, device=device)[:, : rows * cols].view(count, rows, cols)


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """(k, m, p) @ (k, p, n) -> (k, m, n), the same bits for a matrix at any k (not on a CPU: for a fixed k)."""
    count, rows, cols = left.shape[0], left.shape[1], right.shape[2]
    if not is_cpu(left.device):
        return torch.bmm(left, right)
    out = empty_batch(count, rows, cols, dtype=left.dtype, device=left.device)
    for a, b, c in zip(left, right, out, strict=True):
        torch.mm(_aligned(a), _aligned(b), out=c)
    return out


def _aligned(matrix: Tensor) -> Tensor:
    # (clone keeps a transposed matrix transposed)
    return matrix if matrix.data_ptr() % 64 == 0 else matrix.clone()


def norms(batch: Tensor) -> Tensor:
    """Frobenius norm of each matrix, (k,); safe for entries whose squares overflow or underflow."""
    flat = batch.reshape(batch.shape[0], -1)
    if flat.shape[1] == 0:
        return flat.new_zeros(flat.shape[0])
    largest = flat.abs().amax(1)
    scale = torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest))
    scaled = flat / scale[:, None]
    if not is_cpu(batch.device):
        result: Tensor = torch.linalg.vector_norm(scaled, dim=1)
    else:
        result = torch.stack([torch.linalg.vector_norm(row) for row in scaled])
    return result * scale


def sums(batch: Tensor, dim: int) -> Tensor:
    """The sums of each matrix of (k, m, n): over dim 1 (k, n), over dim 2 (k, m)."""
    return torch.stack([m.sum(dim - 1) for m in batch]) if is_cpu(batch.device) else batch.sum(dim)


def power(batch: Tensor, exponent: float) -> Tensor:
    """Elementwise power of (k, n). The bits of a row do not depend on the others."""
    if not is_cpu(batch.device):
        return batch.pow(exponent)
    return torch.stack([row.clone().pow_(exponent) for row in batch])


def eigh(batch: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (k, d) ascending and eigenvectors (k, d, d); NaN for a matrix that LAPACK could not do."""
    if not is_cpu(batch.device):
        try:
            values, vectors = torch.linalg.eigh(batch)
            return values, vectors
        except _LinAlgError:
            pass  # one of them failed: find out which
    result = [_eigh_one(matrix) for matrix in batch]
    return torch.stack([v for v, _ in result]), _stacked([q for _, q in result])


def qr(batch: Tensor) -> Tensor:
    """The orthonormal factor Q of each matrix, (k, d, d)."""
    if not is_cpu(batch.device):
        basis: Tensor = torch.linalg.qr(batch)[0]
        return basis
    return _stacked([torch.linalg.qr(matrix.clone())[0] for matrix in batch])


def _eigh_one(matrix: Tensor) -> tuple[Tensor, Tensor]:
    try:
        values, vectors = torch.linalg.eigh(matrix.clone())
        return values, vectors
    except _LinAlgError:
        nan = torch.full_like(matrix, torch.nan)
        return nan[0], nan


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    first = matrices[0]
    rows, cols = first.shape
    out = empty_batch(len(matrices), rows, cols, dtype=first.dtype, device=first.device)
    for into, matrix in zip(out, matrices, strict=True):
        into.copy_(matrix)
    return out


def identity_like(batch: Tensor) -> Tensor:
    """One identity matrix, broadcast over the batch."""
    return torch.eye(batch.shape[-1], dtype=batch.dtype, device=batch.device).expand_as(batch)
