"""How a tensor is seen as matrices: each is a few runs of the row-major flattened tensor.

"auto"              (R, C)        one matrix                          (E, R, C)   "stack": E matrices
"stack"             (.., R, C)    one for each index of the leading dimensions (stacked experts)
"flatten"           (O, I, h, w)  one of O rows and I*h*w columns (a convolution); "auto" for 4 dimensions and more
"heads:8"           (R, C)        8 of R/8 rows each
"rows:64,16,16"     (96, C)       3, cut between rows (a fused QKV projection with fewer key than query heads)
"rows:64,16,16*8"   (768, C)      3 as well, whose rows are interleaved in 8 groups of 96:

    group 0  q q q q k v      q: one matrix of the q rows of all groups
    group 1  q q q q k v
                              "heads" and "rows" cut each matrix of a stack in the same way
"""

import math
import re
from dataclasses import dataclass
from functools import lru_cache

from block_optim.core.holding import Holding, Range
from block_optim.core.params import Param
from block_optim.core.pieces import Piece
from layout_planner import Block, Rows, Whole


@dataclass(frozen=True)
class Matrix:
    """One matrix inside a tensor.

    Attributes:
        rows: of the matrix.
        columns: of the matrix.
        ranges: runs of elements [start, stop) of the flattened tensor; one after the other they are the matrix,
            row-major, and each is whole rows.
    """

    rows: int
    columns: int
    ranges: tuple[Range, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return self.rows * self.columns

    def pieces(self, holding: Holding, rank: int) -> list[Piece]:
        """The pieces of the matrix on a rank."""
        result, offset = [], 0
        for first, stop in self.ranges:
            result += [piece.moved(offset - first) for piece in holding.pieces(rank, first, stop)]
            offset += stop - first
        return result


@lru_cache(maxsize=4096)
def matrices_of(name: str, shape: tuple[int, ...], how: str) -> tuple[Matrix, ...]:
    """The matrices of a tensor, in the order of their first elements; none in a tensor without elements.

    Raises:
        ValueError: fewer than two dimensions, a view that is not known or does not fit the shape; names the tensor.
    """
    if len(shape) < 2:
        raise ValueError(
            f"{name}: shape {shape} is not a matrix, which Muon needs; give it to AdamW (mixed_optimizer_for does)"
        )
    if not math.prod(shape):
        return ()
    kind, _, rest = how.partition(":")
    if how == "auto":
        kind = "flatten" if len(shape) > 3 else "stack"
    if kind == "flatten" and not rest:
        rows, columns = shape[0], math.prod(shape[1:])
        return (Matrix(rows, columns, ((0, rows * columns),)),)
    rows, columns = shape[-2:]
    if kind == "stack" and not rest:
        sizes: tuple[int, ...] = (rows,)
        groups = 1
    elif kind == "heads" and re.fullmatch(r"[1-9]\d*", rest):
        if rows % int(rest):
            raise ValueError(f"{name}: matrices={how!r}, but its {rows} rows do not divide into {rest} heads")
        sizes, groups = (rows // int(rest),) * int(rest), 1
    elif kind == "rows" and re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*(\*[1-9]\d*)?", rest):
        counts, _, repeat = rest.partition("*")
        sizes, groups = tuple(int(count) for count in counts.split(",")), int(repeat or 1)
        if sum(sizes) * groups != rows:
            raise ValueError(
                f"{name}: matrices={how!r} are {sum(sizes) * groups} rows, the tensor has {rows}"
            )
    else:
        raise ValueError(
            f'{name}: matrices={how!r} is not known: use "auto", "stack", "flatten", "heads:8", "rows:64,16,16" or '
            '"rows:64,16,16*8"'
        )
    return _split(shape, sizes, groups)


def _split(shape: tuple[int, ...], sizes: tuple[int, ...], groups: int) -> tuple[Matrix, ...]:
    rows, columns = shape[-2:]
    result = []
    for index in range(math.prod(shape[:-2])):
        first = index * rows
        for size in sizes:
            starts = [first + g * sum(sizes) for g in range(groups)]
            ranges = tuple((start * columns, (start + size) * columns) for start in starts)
            result.append(Matrix(size * groups, columns, ranges))
            first += size
    return tuple(result)


def matrices_in(param: Param) -> tuple[Matrix, ...]:
    """The matrices of a parameter by its group's option ``matrices``."""
    return matrices_of(param.name, tuple(param.shape), param.group["matrices"])


def block_of_matrices(name: str, shape: tuple[int, ...], how: str) -> Block | None:
    """Whole(), or for a stack as many rows as its matrices have; None where there is no matrix."""
    if len(shape) < 2 or not math.prod(shape):
        return None
    result = matrices_of(name, shape, how)
    if len(result) == 1:
        return Whole()
    equal = len({m.rows for m in result}) == 1 and len(result[0].ranges) == 1
    # One of them, or all that one matrix of the stack is cut into.
    return Rows(result[0].rows if equal else shape[-2])
