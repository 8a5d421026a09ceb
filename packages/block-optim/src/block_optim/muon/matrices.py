"""How a tensor is seen as matrices: each is a run of the row-major flattened tensor.

"auto"         (R, C)        one matrix
               (E, R, C)     E matrices (stacked experts)
               (O, I, h, w)  one of O rows and I*h*w columns (a convolution)
"flatten"      (O, I, w)     one of O rows and I*w columns, for any number of dimensions
(64, 16, 16)   (96, C)       3, cut between rows (a fused QKV projection); cuts each matrix of a stack in the same way
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from block_optim.core.holding import Holding, Range
from block_optim.core.params import Param
from block_optim.core.pieces import Piece
from layout_planner import Block, Rows, Whole

How = str | tuple[int, ...]  # "auto", "flatten" or the rows of each matrix


@dataclass(frozen=True)
class Matrix:
    """One matrix inside a tensor."""

    rows: int  # of the matrix
    columns: int  # of the matrix
    start: int  # its first element in the flattened tensor, where it is row-major

    @property
    def numel(self) -> int:
        """Elements."""
        return self.rows * self.columns

    @property
    def range(self) -> Range:
        """Its elements [start, stop) of the flattened tensor."""
        return self.start, self.start + self.numel

    def pieces(self, holding: Holding, rank: int) -> list[Piece]:
        """The pieces of the matrix on a rank, counted from its first element."""
        return [piece.moved(-self.start) for piece in holding.pieces(rank, *self.range)]


@lru_cache(maxsize=4096)
def matrices_of(name: str, shape: tuple[int, ...], how: How) -> tuple[Matrix, ...]:
    """The matrices of a tensor in order, none without elements; ValueError, naming it, if shape or rows do not fit."""
    if len(shape) < 2:
        raise ValueError(
            f"{name}: shape {shape} is not a matrix, which Muon needs; give it to AdamW (mixed_optimizer_for does)"
        )
    if not math.prod(shape):
        return ()
    if how == "flatten" or (how == "auto" and len(shape) > 3):
        return (Matrix(shape[0], math.prod(shape[1:]), 0),)
    *batch, rows, columns = shape
    sizes = (rows,) if isinstance(how, str) else how
    if sum(sizes) != rows:
        raise ValueError(f"{name}: matrices={how!r} are {sum(sizes)} rows, the tensor has {rows}")
    result, start = [], 0
    for size in sizes * math.prod(batch):
        result.append(Matrix(size, columns, start))
        start += size * columns
    return tuple(result)


def check_how(how: object) -> How:
    """``how`` with rows as a tuple; ValueError unless "auto", "flatten" or positive numbers of rows."""
    if isinstance(how, (tuple, list)) and how and all(type(size) is int and size > 0 for size in how):
        return tuple(how)
    if how not in ("auto", "flatten"):
        raise ValueError(f'matrices={how!r}: expected "auto", "flatten" or rows such as (64, 16, 16)')
    return str(how)


def matrices_in(param: Param) -> tuple[Matrix, ...]:
    """The matrices of a parameter by its group's option ``matrices``."""
    return matrices_of(param.name, tuple(param.shape), param.group["matrices"])


def block_of_matrices(name: str, shape: tuple[int, ...], how: How) -> Block | None:
    """Whole(), or for a stack as many rows as its matrices have; None where there is no matrix."""
    if len(shape) < 2 or not math.prod(shape):
        return None
    result = matrices_of(name, shape, check_how(how))
    if len(result) == 1:
        return Whole()
    # One of them, or all that one matrix of the stack is cut into.
    return Rows(result[0].rows if len({m.rows for m in result}) == 1 else shape[-2])
