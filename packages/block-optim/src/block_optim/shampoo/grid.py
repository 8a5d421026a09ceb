"""Blocks of a tensor for Shampoo and SOAP: a grid that depends on nothing but its global shape.

    a tensor as matrices (batch, rows, cols); max_dim = 4

                cols = 10
              0    4    8  10
            0 +----+----+--+          strip 0: rows 0..4 of matrix 0, one contiguous run of the tensor
              | b0 | b1 |b2|          block b0: a 4 x 4 factor for its rows, a 4 x 4 factor for its columns
     rows   4 +----+----+--+
     = 6      | b3 | b4 |b5|          strip 1: short; block b5 has a 2 x 2 factor on both sides
            6 +----+----+--+

| tensor | matrices |
| --- | --- |
| 2-D | itself |
| 3-D | stacked experts, one for each index of the first dimension |
| 4-D and more | convolution: the first dimension by all others, flattened |
| 0-d, 1-D, a matrix of one row or one column | none: element by element |

A dimension above `diagonal_above` (a vocabulary) has diagonal factors; a matrix where both are so large goes element
by element. A strip must be whole on a rank; `block_of` returns it for the planner.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from layout_planner import Elements, Tile


@dataclass(frozen=True)
class Strip:
    """`rows` rows of one matrix, all columns: elements start..stop of the flattened tensor."""

    start: int
    stop: int
    rows: int


@dataclass(frozen=True)
class Grid:
    """The strips and blocks of one tensor."""

    shape: tuple[int, ...]
    # batch, rows, cols: the matrices
    batch: int
    rows: int
    cols: int
    max_dim: int  # rows of a strip, and columns of a block; the last ones may be short
    # diagonal_rows, diagonal_cols: whether the factors of that side are diagonal
    diagonal_rows: bool
    diagonal_cols: bool

    @property
    def strips_per_matrix(self) -> int:
        """Strips in each of the stacked matrices."""
        return -(-self.rows // self.max_dim)

    @property
    def num_strips(self) -> int:
        """Strips of the tensor."""
        return self.batch * self.strips_per_matrix

    @cached_property
    def columns(self) -> tuple[tuple[int, int], ...]:
        """First column and width of each block of a strip."""
        return tuple((c, min(self.max_dim, self.cols - c)) for c in range(0, self.cols, self.max_dim))

    def strip(self, index: int) -> Strip:
        """Strip `index`, in storage order."""
        matrix, row = divmod(index, self.strips_per_matrix)
        first = row * self.max_dim
        rows = min(self.max_dim, self.rows - first)
        start = (matrix * self.rows + first) * self.cols
        return Strip(start, start + rows * self.cols, rows)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """The sizes of all blocks, in storage order."""
        for index in range(self.num_strips):
            for _, width in self.columns:
                yield self.strip(index).rows, width

    def cost(self, strip: Strip) -> int:
        """Work of one step on a strip: multiplications of factors and of roots."""
        return sum(4 * strip.rows * width * (strip.rows + width) for _, width in self.columns)


def grid_of(shape: tuple[int, ...], options: Mapping[str, Any]) -> Grid | None:
    """The grid that options give a tensor, by the table above; None where it goes element by element."""
    if len(shape) < 2 or math.prod(shape) == 0:
        return None
    if len(shape) <= 3:
        batch, rows, cols = math.prod(shape[:-2]), shape[-2], shape[-1]
    else:
        batch, rows, cols = 1, shape[0], math.prod(shape[1:])
    diagonal = (rows > options["diagonal_above"], cols > options["diagonal_above"])
    if min(rows, cols) == 1 or all(diagonal):
        return None
    return Grid(tuple(shape), batch, rows, cols, options["max_preconditioner_dim"], *diagonal)


def block_of(grid: Grid | None) -> Tile | Elements | None:
    """The block that the planner must not cut, so that each of these blocks is on one rank; None: cut anywhere."""
    if grid is None:
        return None
    if (grid.rows, grid.cols) == tuple(grid.shape[-2:]):
        return Tile(min(grid.max_dim, grid.rows), min(grid.max_dim, grid.cols))
    return Elements(grid.max_dim * grid.cols)  # flattened: a strip spans more than the last two dimensions
