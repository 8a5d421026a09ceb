"""Blocks in memory: matrices of tiles, cut to the size of the scratch, and the scratch with views of the tiles."""

import math
from dataclasses import dataclass, replace

import torch

from block_optim.core.grid import ScaleLayout
from block_optim.core.runs import offset_of
from layout_planner import Elements


@dataclass(frozen=True)
class Stretch:
    """Consecutive blocks of a flat run that one sequence of ops can work on: a matrix of tiles."""

    start: int  # the first element, counted from the run's first
    # rows, columns: of the memory, row-major
    rows: int
    columns: int
    tile: tuple[int, int]  # rows and columns of a tile; the last of each may be short
    scale: int  # the first scale, counted like elements

    @property
    def uniform(self) -> bool:
        """Whether no tile is short."""
        return self.rows % self.tile[0] == 0 and self.columns % self.tile[1] == 0

    @property
    def numel(self) -> int:
        """Elements in memory."""
        return self.rows * self.columns

    @property
    def num_scales(self) -> int:
        """Tiles."""
        return math.prod(self.grid)

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles from top to bottom and from left to right."""
        return -(-self.rows // self.tile[0]), -(-self.columns // self.tile[1])

    def matrix(self, first: torch.Tensor) -> torch.Tensor:
        """A view of the stretch as (rows, columns); ``first`` is the tensor with which the run begins."""
        return first.as_strided((self.rows, self.columns), (self.columns, 1), offset_of(first) + self.start)

    def pieces(self, limit: int) -> "list[Stretch]":
        """The stretch in pieces of at most ``limit`` elements, or of one band of tiles if that is larger."""
        height, width = self.grid
        count = max(1, limit // (self.tile[0] * width * self.tile[1]))
        return [self.bands(first, min(count, height - first)) for first in range(0, height, count)]

    def joins(self, other: "Stretch") -> bool:
        """Whether ``other`` begins where this one ends."""
        return (
            self.uniform
            and other.uniform
            and (self.columns, self.tile) == (other.columns, other.tile)
            and other.start == self.start + self.numel
            and other.scale == self.scale + self.num_scales
        )

    def bands(self, first: int, count: int) -> "Stretch":
        """``count`` bands of tiles from the ``first`` on."""
        top = first * self.tile[0]
        rows = min(count * self.tile[0], self.rows - top)
        start, scale = self.start + top * self.columns, self.scale + first * self.grid[1]
        return replace(self, start=start, rows=rows, scale=scale)


def stretches_of(layout: ScaleLayout, start: int, scale: int) -> list[Stretch]:
    """The elements of a parameter that this rank holds, at element ``start`` of a run, their scales at ``scale``."""
    grid, numel = layout.slab, layout.stop - layout.start
    if isinstance(grid.block, Elements):
        count = grid.block.count
        full, rest = divmod(numel, count)
        result = [Stretch(start, full, count, (1, count), scale)] if full else []
        if rest:
            result.append(Stretch(start + full * count, 1, rest, (1, count), scale + full))
        return result
    if not numel:
        return []
    rows, columns = grid.shape[-2:]
    tile = (grid.block.rows, grid.block.columns)
    row, end = layout.start // columns, layout.stop // columns
    if rows % tile[0] == 0:
        return [Stretch(start, end - row, columns, tile, scale)]
    result = []
    while row < end:
        stop = min(end, (row // rows + 1) * rows)
        result.append(Stretch(start, stop - row, columns, tile, scale))
        start, scale = start + result[-1].numel, scale + result[-1].num_scales
        row = stop
    return result


def merged(stretches: list[Stretch]) -> list[Stretch]:
    """The blocks in as few stretches as possible."""
    result: list[Stretch] = []
    for stretch in stretches:
        if result and result[-1].joins(stretch):
            last = result.pop()
            stretch = replace(last, rows=last.rows + stretch.rows)
        result.append(stretch)
    return result


@dataclass
class Buffer:
    """A scratch of fp32 numbers, and the views of it that a stretch of blocks needs; all share memory."""

    values: torch.Tensor  # 1-D, whole tiles
    bits: torch.Tensor  # the same as int32
    tiles: torch.Tensor  # values as (bands, rows, columns, columns)
    inner: torch.Tensor  # of values: the memory, in its shape
    inner_bits: torch.Tensor
    padding: list[torch.Tensor]  # of values: the rest of short tiles


class TileScratch:
    """``count`` buffers of ``numel`` elements that all steps over tiles of a device share."""

    def __init__(self, device: torch.device, numel: int, count: int) -> None:
        self._flat = [torch.zeros(numel, dtype=torch.float32, device=device) for _ in range(count)]
        self._made: dict[tuple[int, int, tuple[int, int]], list[Buffer]] = {}

    def buffers(self, stretch: Stretch) -> list[Buffer]:
        """The buffers with views for a stretch of this shape."""
        key = (stretch.rows, stretch.columns, stretch.tile)
        if key not in self._made:
            self._made[key] = [_buffer(flat, stretch) for flat in self._flat]
        return self._made[key]

    @staticmethod
    def size(stretch: Stretch) -> int:
        """Elements that a stretch takes, with the rest of short tiles."""
        return math.prod(stretch.grid) * math.prod(stretch.tile)


def _buffer(flat: torch.Tensor, stretch: Stretch) -> Buffer:
    (height, width), (rows, columns) = stretch.grid, stretch.tile
    values = flat[: height * rows * width * columns]
    matrix = values.view(height * rows, width * columns)
    inner = matrix[: stretch.rows, : stretch.columns]
    rest = [matrix[stretch.rows :], matrix[: stretch.rows, stretch.columns :]]
    return Buffer(
        values,
        values.view(torch.int32),
        values.view(height, rows, width, columns),
        inner,
        inner.view(torch.int32),
        [t for t in rest if t.numel()],
    )
