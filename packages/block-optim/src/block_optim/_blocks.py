"""Block grids: which blocks a tensor has, which of them a rank holds, and how the tensor of their scales lies.

    weight (5, 6), Tile(2, 4)        scales (3, 2)        rank 0 holds rows 0-3: scales 0-1
        a a a a b b                    a b                rank 1 holds row 4:    scales 2
        a a a a b b                    c d                (the grid is the global tensor's, so cuts must fall between
        c c c c d d                    e f                 bands; the last tile of a row or a column may be short)
        c c c c d d
        e e e e f f

`Elements(n)` cuts the flattened tensor; its scales are one-dimensional.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from block_optim._params import Param, wrap_local
from layout_planner import Elements, Tile
from ragged_shard import RaggedShard


@dataclass(frozen=True)
class Grid:
    """The blocks of one global tensor: every `rows` x `columns` of each matrix, or every `columns` elements.

    Attributes:
        shape: the global tensor's; () and 1-D ones have Elements only.
        block: `Elements` or `Tile`.
    """

    shape: tuple[int, ...]
    block: Elements | Tile

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """One scale for each block."""
        if isinstance(self.block, Elements):
            return (-(-math.prod(self.shape) // self.block.count),)
        *batch, rows, columns = self.shape
        return (*batch, -(-rows // self.block.rows), -(-columns // self.block.columns))

    def scales_before(self, offset: int) -> int | None:
        """How many scales belong to the elements before ``offset``; None where that cuts a block."""
        numel = math.prod(self.shape)
        if offset == numel:
            return math.prod(self.scale_shape)
        if isinstance(self.block, Elements):
            return offset // self.block.count if offset % self.block.count == 0 else None
        rows, columns = self.shape[-2:]
        matrix, row = divmod(offset // columns, rows)
        if offset % columns or row % self.block.rows:
            return None
        bands, width = self.scale_shape[-2:]
        return (matrix * bands + row // self.block.rows) * width

    def cut_points(self) -> str:
        """For messages: where a cut may be."""
        if isinstance(self.block, Elements):
            return f"every {self.block.count} elements"
        return f"every {self.block.rows} rows"


def check_block(block: Any) -> Elements | Tile:
    """``block`` if it is one that states can have.

    Raises:
        ValueError: another kind of block.
    """
    if not isinstance(block, (Elements, Tile)):
        raise ValueError(f"block={block!r}: 8-bit states have Elements(n) or Tile(rows, columns) blocks")
    return block


def scale_layout(param: Param, block: Elements | Tile) -> tuple[Grid, tuple[Any, ...]]:
    """The grid of a parameter and the placements of its scales' tensor, which follow the parameter's.

    Raises:
        ValueError: some rank's part begins inside a block, or is not one run of the tensor; the same on every rank.
    """
    if isinstance(block, Tile) and len(param.shape) < 2:
        raise ValueError(f"{param.name}: {block} needs rows and columns, the shape is {tuple(param.shape)}")
    grid = Grid(tuple(param.shape), block)
    cutting = [(i, p) for i, p in enumerate(param.placements) if not isinstance(p, Replicate)]
    if param.mesh is None or not cutting:
        return grid, param.placements
    part = grid
    if len(cutting) == 2 and type(cutting[0][1]) is Shard and cutting[0][1].dim == 0:
        part = _part_of(param, grid, param.mesh.size(cutting[0][0]))
        cutting = cutting[1:]
    if len(cutting) != 1:
        raise _refusal(param, "they cut it more than once")
    axis, placement = cutting[0]
    bounds = _bounds(param, placement, part.shape, param.mesh.size(axis))
    before = [part.scales_before(bound) for bound in bounds]
    for rank, found in enumerate(before):
        if found is None:
            raise ValueError(
                f"{param.name}: the part of rank {rank} begins at element {bounds[rank]}, inside a block of {block} "
                f"(shape {part.shape} may be cut {part.cut_points()}). Shard with "
                "fully_shard(..., block_policy=AdamW8bit.block_policy(block=...)), choose a block that fits, or keep "
                "its states in fp32 with quantize=False in its group"
            )
    units = [after - b for b, after in itertools.pairwise(x for x in before if x is not None)]
    dims = tuple(range(max(len(grid.scale_shape) - 1, 1)))
    placements = list(param.placements)
    placements[axis] = RaggedShard(dims, units)
    return grid, tuple(placements)


def wrap_scales(param: Param, grid: Grid, placements: tuple[Any, ...], local: torch.Tensor) -> torch.Tensor:
    """The scales' global tensor around this rank's part of it."""
    ragged = any(isinstance(p, RaggedShard) for p in placements)
    return wrap_local(local, param.mesh, placements, grid.scale_shape, ragged)


def local_scales(param: Param, grid: Grid) -> int:
    """How many scales this rank's part of a parameter has."""
    assert param.start is not None
    first = grid.scales_before(param.start)
    after = grid.scales_before(param.start + param.local.numel())
    assert first is not None
    assert after is not None
    return after - first


def _part_of(param: Param, grid: Grid, parts: int) -> Grid:
    """The grid of one of several equal parts of dimension 0, where blocks fit into them."""
    rows = param.shape[0]
    part = Grid((rows // parts, *param.shape[1:]), grid.block)
    if rows % parts or math.prod(part.scale_shape) * parts != math.prod(grid.scale_shape):
        raise _refusal(param, f"Shard(0) makes {parts} parts that do not hold whole blocks of {grid.block}")
    return part


def _bounds(param: Param, placement: Any, shape: tuple[int, ...], ranks: int) -> list[int]:
    """Where the parts of all ranks begin in a flattened tensor, and its end."""
    numel = math.prod(shape)
    if type(placement) is RaggedShard:
        ends = itertools.accumulate(placement.local_units, initial=0)
        return [end * numel // placement.total_units for end in ends]
    if type(placement) is Shard and placement.dim == 0:
        chunk = -(-shape[0] // ranks)
        return [min(rank * chunk, shape[0]) * (numel // max(shape[0], 1)) for rank in range(ranks + 1)]
    raise _refusal(param, f"{placement!r} leaves no run of whole rows on a rank")


def _refusal(param: Param, reason: str) -> ValueError:
    return ValueError(
        f"{param.name}: 8-bit states need a run of whole blocks on each rank, but with placements {param.placements} "
        f"{reason}; keep its states in fp32 with quantize=False in its group"
    )


@dataclass(frozen=True)
class Stretch:
    """Consecutive blocks of a flat run that one sequence of ops can work on: a matrix of tiles.

    Attributes:
        start: the first element, counted from the run's first.
        rows, columns: of the memory, row-major.
        tile: rows and columns of a tile; the last of each may be short.
        scale: the first scale, counted like elements.
    """

    start: int
    rows: int
    columns: int
    tile: tuple[int, int]
    scale: int

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
        return -(-self.rows // self.tile[0]) * -(-self.columns // self.tile[1])

    def joins(self, other: "Stretch") -> bool:
        """Whether ``other`` goes on where this one ends."""
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
        width = -(-self.columns // self.tile[1])
        return Stretch(
            self.start + top * self.columns, rows, self.columns, self.tile, self.scale + first * width
        )


def stretches_of(param: Param, grid: Grid, start: int, scale: int) -> list[Stretch]:
    """The local part of a parameter, which lies at element ``start`` of a run, its scales at ``scale``."""
    assert param.start is not None
    numel = param.local.numel()
    if isinstance(grid.block, Elements):
        count = grid.block.count
        full, rest = divmod(numel, count)
        found = [Stretch(start, full, count, (1, count), scale)] if full else []
        if rest:
            found.append(Stretch(start + full * count, 1, rest, (1, count), scale + full))
        return found
    rows, columns = param.shape[-2:]
    tile = (grid.block.rows, grid.block.columns)
    row, end = param.start // columns, (param.start + numel) // columns
    if rows % tile[0] == 0:
        return [Stretch(start, end - row, columns, tile, scale)] if numel else []
    found = []
    while row < end:
        stop = min(end, (row // rows + 1) * rows)
        found.append(Stretch(start, stop - row, columns, tile, scale))
        start, scale = start + found[-1].numel, scale + found[-1].num_scales
        row = stop
    return found


def merged(stretches: list[Stretch]) -> list[Stretch]:
    """The same blocks in as few stretches as can be."""
    found: list[Stretch] = []
    for stretch in stretches:
        if found and found[-1].joins(stretch):
            last = found.pop()
            stretch = Stretch(last.start, last.rows + stretch.rows, last.columns, last.tile, last.scale)
        found.append(stretch)
    return found
