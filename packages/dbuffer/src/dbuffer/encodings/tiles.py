"""The elements of a tensor that share a scale, and their places: arithmetic only, no memory.

    columns          0        128       256  300
    rows 0..127      | tile 0  | tile 1  | 2 |        a band: 128 rows, one row of tiles
         128..255    | tile 3  | tile 4  | 5 |
         256..279    | tile 6  | tile 7  | 8 |        tiles at the edges are short

A matrix is the last two dimensions of a tensor; its leading ones are flattened, and tiles start over in each stacked
matrix, as `layout_planner.Tile` cuts it. A 1-D tensor is one row. Scales are row-major over the tiles.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple


@dataclass(frozen=True)
class TileGrid:
    """The tiles of one tensor: their rows and columns, each at least 1."""

    shape: tuple[int, ...]
    tile: tuple[int, int]

    @cached_property
    def columns(self) -> int:
        """Elements of a row: the last dimension."""
        return self.shape[-1] if self.shape else 1

    @cached_property
    def rows(self) -> int:
        """Rows of all stacked matrices together."""
        return math.prod(self.shape[:-1])

    @cached_property
    def period(self) -> int:
        """Rows after which tiles start over: a matrix's rows, or all rows if its bands are never short."""
        matrix = self.shape[-2] if len(self.shape) > 1 else 1
        return self.rows if matrix == 0 or matrix % self.tile[0] == 0 else matrix

    @cached_property
    def across(self) -> int:
        """Tiles of a band."""
        return -(-self.columns // self.tile[1])

    @cached_property
    def num_bands(self) -> int:
        """Bands of the tensor."""
        return self.band_of(self.rows)

    @property
    def num_scales(self) -> int:
        """Tiles of the tensor."""
        return self.num_bands * self.across

    def band_of(self, row: int) -> int:
        """The band that a row is in; for `rows`, the number of bands."""
        if not self.period:
            return 0
        matrix, inside = divmod(row, self.period)
        return matrix * -(-self.period // self.tile[0]) + inside // self.tile[0]

    def is_whole(self, start: int, stop: int) -> bool:
        """Whether the rows [start, stop) cut no tile."""
        return start == stop or all(
            row == self.rows or row % self.period % self.tile[0] == 0 for row in (start, stop)
        )

    def scales_of(self, start: int, stop: int) -> tuple[int, int]:
        """The scales [first, last) of the rows [start, stop), whole bands."""
        return self.band_of(start) * self.across, self.band_of(stop) * self.across


@dataclass(frozen=True)
class RowRun:
    """Consecutive rows of one tensor, and their places in the flat buffers of a call.

    Args:
        grid: the tensor's tiles.
        start, stop: its rows [start, stop), counted over all stacked matrices; may be empty.
        values: of the buffer of values, the index of the run's first element.
        codes: of the buffer of codes, the byte where they begin.
        scales: of the buffer of scales, the element where the scales `grid.scales_of(start, stop)` begin.
        element: the run's first element as stochastic rounding counts it, such as its index in the whole tensor
            or buffer.
    """

    grid: TileGrid
    start: int
    stop: int
    values: int = 0
    codes: int = 0
    scales: int = 0
    element: int = 0

    @property
    def numel(self) -> int:
        """Elements of the run."""
        return (self.stop - self.start) * self.grid.columns

    @property
    def num_scales(self) -> int:
        """Scales of the run."""
        return (self.grid.band_of(self.stop) - self.grid.band_of(self.start)) * self.grid.across

    def moved(self, values: int, codes: int, scales: int, element: int) -> "RowRun":
        """The same rows, so much further on in each buffer."""
        return replace(
            self,
            values=self.values + values,
            codes=self.codes + codes,
            scales=self.scales + scales,
            element=self.element + element,
        )


Runs = Sequence[RowRun]


class RunList(tuple[RowRun, ...]):
    """Runs for many calls, which share the kernels' tables of them, by device."""

    def __init__(self, runs: Iterable[RowRun]) -> None:
        self.tables: dict[Any, Any] = {}


class Bands(NamedTuple):
    """Consecutive bands of one height in a run."""

    row: int  # the first row, counted from the run's first
    # bands, height: how many, and rows of each
    bands: int
    height: int
    band: int  # the first band, counted from the band of the run's first row


def bands_of(run: RowRun, limit: int = 1 << 62) -> Iterator[Bands]:
    """Every band of a run once, in pieces of at most `limit` elements, or of one band; none without columns."""
    grid, row = run.grid, run.start
    tile, period, first = grid.tile[0], grid.period, grid.band_of(run.start)
    most = max(1, limit // max(1, tile * grid.columns))
    while row < run.stop and grid.columns:
        left = min(run.stop, row - row % period + period) - row
        height = min(tile, left)
        bands = min(most, left // height)
        yield Bands(row - run.start, bands, height, grid.band_of(row) - first)
        row += bands * height
