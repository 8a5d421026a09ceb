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
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple


@dataclass(frozen=True)
class TileGrid:
    """The tiles of one tensor.

    Args:
        shape: the tensor's.
        tile: rows and columns of a tile, each at least 1.
    """

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
    def bands_per_period(self) -> int:
        """Bands until tiles start over."""
        return -(-self.period // self.tile[0])

    @cached_property
    def num_bands(self) -> int:
        """Bands of the tensor."""
        return self.rows // self.period * self.bands_per_period if self.period else 0

    @property
    def num_scales(self) -> int:
        """Tiles of the tensor."""
        return self.num_bands * self.across

    def band_of(self, row: int) -> int:
        """The band that a row is in; for `rows`, the number of bands."""
        if row == self.rows:
            return self.num_bands
        matrix, inside = divmod(row, self.period)
        return matrix * self.bands_per_period + inside // self.tile[0]

    def is_whole(self, start: int, stop: int) -> bool:
        """Whether the rows [start, stop) cut no tile."""
        return start == stop or (self._is_cut(start) and self._is_cut(stop))

    def _is_cut(self, row: int) -> bool:
        return row == self.rows or row % self.period % self.tile[0] == 0

    def scales_of(self, start: int, stop: int) -> tuple[int, int]:
        """The scales [first, last) of the rows [start, stop), whole bands."""
        return self.band_of(start) * self.across, self.band_of(stop) * self.across


@dataclass(frozen=True)
class RowRun:
    """Consecutive rows of one tensor, and where they lie in the flat buffers that a call is given.

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
        first, last = self.grid.scales_of(self.start, self.stop)
        return last - first


Runs = Sequence[RowRun]


class RunList(tuple[RowRun, ...]):
    """Runs for many calls, which share the kernels' tables of them.

    Attributes:
        tables: by device, for the kernels' launches.
    """

    tables: dict[Any, Any]

    def __new__(cls, runs: Iterable[RowRun]) -> "RunList":
        """A tuple of the runs."""
        result = super().__new__(cls, runs)
        result.tables = {}
        return result


class Bands(NamedTuple):
    """Consecutive bands of one height in a run, or a piece of a tall one.

    Attributes:
        row: the first row, counted from the run's first.
        bands, height: how many, and rows of each.
        band: the first band, counted from the band of the run's first row.
    """

    row: int
    bands: int
    height: int
    band: int


def bands_of(grid: TileGrid, start: int, stop: int) -> Iterator[Bands]:
    """Every row of [start, stop) once, in few pieces however many bands there are."""
    tile, period, row = grid.tile[0], grid.period, start
    first = grid.band_of(start)
    while row < stop:
        inside = row % period
        end = min(stop, row - inside + period)
        if end - row >= tile:
            bands, height = (end - row) // tile, tile
        else:
            bands, height = 1, end - row
        yield Bands(row - start, bands, height, grid.band_of(row) - first)
        row += bands * height


def chunks_of(run: RowRun, limit: int) -> Iterator[Bands]:
    """The run's bands in pieces of at most `limit` elements, or of one row; tall bands are cut between rows."""
    columns = run.grid.columns
    if not columns:
        return
    for piece in bands_of(run.grid, run.start, run.stop):
        rows = max(1, limit // columns)
        bands = rows // piece.height
        if bands:
            for b in range(0, piece.bands, bands):
                count = min(bands, piece.bands - b)
                yield Bands(piece.row + b * piece.height, count, piece.height, piece.band + b)
            continue
        for b in range(piece.bands):
            for h in range(0, piece.height, rows):
                row = piece.row + b * piece.height + h
                yield Bands(row, 1, min(rows, piece.height - h), piece.band + b)
