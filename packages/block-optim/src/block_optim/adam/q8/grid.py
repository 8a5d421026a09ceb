"""Block grids of 8-bit states: which blocks a tensor has, where ranks may cut it, how the tensor of scales lies.

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

import torch
from torch.distributed.tensor import Placement, Replicate

from block_optim.core.holding import Holding, cutting_axes, holding_of, wrap_local
from block_optim.core.params import Param
from layout_planner import Block, Elements, Tile, parse_block
from ragged_shard import RaggedShard, StridedRaggedShard


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


def check_block(block: Block | int | str) -> Elements | Tile:
    """``block`` if it is one that states can have; also from its text, or a number of elements.

    Raises:
        ValueError: another kind of block.
    """
    if isinstance(block, str):
        block = parse_block(block)
    elif isinstance(block, int) and not isinstance(block, bool) and block > 0:
        block = Elements(block)
    if not isinstance(block, (Elements, Tile)):
        raise ValueError(f"block={block!r}: 8-bit states have Elements(n) or Tile(rows, columns) blocks")
    return block


def scale_layout(param: Param, block: Elements | Tile) -> tuple[Grid, tuple[Placement, ...]]:
    """The grid of a parameter and the placements of its scales' tensor, which follow the parameter's.

    Raises:
        ValueError: what some rank holds begins inside a block, or is not one run of the tensor; the same on all ranks.
    """
    if isinstance(block, Tile) and len(param.shape) < 2:
        raise ValueError(f"{param.name}: {block} needs rows and columns, the shape is {tuple(param.shape)}")
    grid = Grid(tuple(param.shape), block)
    holding, mesh, lengths = param.holding, param.mesh, list[int]()
    if mesh is not None and holding.axis is not None:
        if isinstance(param.placements[holding.axis], StridedRaggedShard):
            raise _refusal(param, "another axis cuts it first")
        # Ranks of the other axes hold other rows: all must find the same, or all must refuse.
        sizes = [mesh.size(a) if a != holding.axis else 1 for a in range(mesh.ndim)]
        found = {
            _scales_by_rank(param, grid, holding_of(param.name, param.shape, mesh, param.placements, where))
            for where in itertools.product(*map(range, sizes))
        }
        if len(found) > 1:
            raise _refusal(param, f"its axes leave ranks different numbers of blocks of {block}")
        lengths = list(found.pop())
    dims, cutting = tuple(range(max(len(grid.scale_shape) - 1, 1))), cutting_axes(mesh, param.placements)
    placements: list[Placement] = []
    for axis, placement in enumerate(param.placements):
        if axis == holding.axis:
            placements.append(RaggedShard(dims, lengths))
        elif isinstance(placement, RaggedShard):  # on an axis of size 1
            placements.append(RaggedShard(dims, [1]))
        else:
            placements.append(placement if axis in cutting else Replicate())
    return grid, tuple(placements)


def _scales_by_rank(param: Param, grid: Grid, holding: Holding) -> tuple[int, ...]:
    before = [grid.scales_before(cut) for cut in holding.cuts]
    for rank, found in enumerate(before):
        if found is None:
            raise ValueError(
                f"{param.name}: what rank {rank} holds begins at element {holding.cuts[rank]}, inside a block of "
                f"{grid.block} (shape {grid.shape} may be cut {grid.cut_points()}). Shard with "
                "fully_shard(..., block_policy=AdamW8bit.block_policy(block=...)), choose a block that fits, or keep "
                "its states in fp32 with quantize=False in its group"
            )
    return tuple(after - b for b, after in itertools.pairwise(x for x in before if x is not None))


def wrap_scales(
    param: Param, grid: Grid, placements: tuple[Placement, ...], local: torch.Tensor
) -> torch.Tensor:
    """The scales' global tensor around this rank's scales."""
    ragged = any(isinstance(p, RaggedShard) for p in placements)
    return wrap_local(local, param.mesh, placements, grid.scale_shape, ragged)


def local_scales(param: Param, grid: Grid) -> int:
    """How many scales the elements of a parameter have that this rank holds."""
    assert param.start is not None
    first = grid.scales_before(param.start)
    after = grid.scales_before(param.start + param.local.numel())
    assert first is not None
    assert after is not None
    return after - first


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
    """The elements of a parameter that this rank holds, at element ``start`` of a run, their scales at ``scale``."""
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
