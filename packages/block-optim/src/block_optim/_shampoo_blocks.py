"""Which blocks a tensor has for Shampoo and SOAP: a grid that depends on its global shape and on nothing else.

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
| 3-D | stacked experts, one for each index of the first dimension; "flatten": a convolution, as below |
| 4-D and more | convolution: the first dimension by all others, flattened; "stack": the last two of each |
| 0-d, 1-D, a matrix of one row or one column | none: element by element |

A dimension above `diagonal_above` (a vocabulary) has diagonal factors; a matrix where both are so large goes element
by element. A strip is what has to be whole on a rank; `block_of` says it to the planner.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from layout_planner import Elements, Tile


@dataclass(frozen=True)
class Strip:
    """`rows` rows of one matrix, all columns: elements start..stop of the flattened tensor."""

    index: int
    start: int
    stop: int
    rows: int


@dataclass(frozen=True)
class Block:
    """Columns `column` .. `column + cols` of a strip; `index` counts the tensor's blocks in storage order."""

    index: int
    rows: int
    cols: int
    column: int


@dataclass(frozen=True)
class Grid:
    """The blocks of one tensor."""

    shape: tuple[int, ...]
    batch: int
    rows: int
    cols: int
    max_dim: int
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
        return Strip(index, start, start + rows * self.cols, rows)

    def blocks(self, strip: Strip) -> Iterator[Block]:
        """The blocks of a strip, left to right."""
        base = strip.index * len(self.columns)
        for j, (column, width) in enumerate(self.columns):
            yield Block(base + j, strip.rows, width, column)

    def cost(self, strip: Strip) -> int:
        """Work of one step on a strip: multiplications of factors and of roots."""
        return sum(4 * strip.rows * width * (strip.rows + width) for _, width in self.columns)


MATRICES = ("auto", "stack", "flatten")


def matrices(shape: tuple[int, ...], how: str = "auto") -> tuple[int, int, int] | None:
    """(batch, rows, cols) of a tensor by the table above, or None where it goes element by element.

    Args:
        shape: global.
        how: "auto" (by the table), "stack" or "flatten".
    """
    if len(shape) < 2 or math.prod(shape) == 0:
        return None
    if len(shape) == 2 or how == "stack" or (how == "auto" and len(shape) == 3):
        found = (math.prod(shape[:-2]), shape[-2], shape[-1])
    else:
        found = (1, shape[0], math.prod(shape[1:]))
    return None if min(found[1:]) == 1 else found


def grid_of(
    shape: tuple[int, ...], max_dim: int, *, diagonal_above: int = 65536, how: str = "auto"
) -> Grid | None:
    """The grid of a tensor, or None where it goes element by element."""
    found = matrices(tuple(shape), how)
    if found is None:
        return None
    batch, rows, cols = found
    diagonal = (rows > diagonal_above, cols > diagonal_above)
    if all(diagonal):
        return None
    return Grid(tuple(shape), batch, rows, cols, max_dim, *diagonal)


def block_of(
    shape: tuple[int, ...], max_dim: int, *, diagonal_above: int = 65536, how: str = "auto"
) -> Tile | Elements | None:
    """What the planner must not cut so that each block lies on one rank; None: cut it anywhere."""
    grid = grid_of(shape, max_dim, diagonal_above=diagonal_above, how=how)
    if grid is None:
        return None
    if (grid.rows, grid.cols) == tuple(shape[-2:]):
        return Tile(min(max_dim, grid.rows), min(max_dim, grid.cols))
    return Elements(max_dim * grid.cols)  # flattened: a strip spans more than the last two dimensions
