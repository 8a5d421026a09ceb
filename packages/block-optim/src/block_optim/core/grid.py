"""Block grids of 8-bit states: the blocks of a tensor, where ranks may cut it, and the placements of its scales.

    weight (5, 6), Tile(2, 4)        scales (3, 2)        rank 0 holds rows 0-3: scales 0-1
        a a a a b b                    a b                rank 1 holds row 4:    scales 2
        a a a a b b                    c d                (the grid is the global tensor's, so cuts must fall between
        c c c c d d                    e f                 bands; the last tile of a row or a column may be short)
        c c c c d d
        e e e e f f

`Elements(n)` cuts the flattened tensor; its scales are one-dimensional.

`block="auto"` takes blocks that no cut between rows goes through; see `auto_block`.

Tensor and expert parallelism leave a slab of the tensor on a rank. If their cuts are between blocks, the slab's
grid has the same blocks, and its scales are the same slab of the tensor of scales.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from block_optim.core._torch_compat import SHARDS, TorchStridedShard
from block_optim.core.holding import cutting_axes, wrap_local
from block_optim.core.params import Param
from block_optim.core.pieces import pieces_of
from layout_planner import Block, Elements, Tile, parse_block
from ragged_shard import RaggedShard, StridedRaggedShard, held_boxes

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


@dataclass(frozen=True)
class Grid:
    """The blocks of one global tensor: every `rows` x `columns` of each matrix, or every `columns` elements."""

    shape: tuple[int, ...]  # the global tensor's; () and 1-D ones have Elements only
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

    def scales_of(self, offsets: Sequence[int], sizes: Sequence[int]) -> Box | None:
        """(offsets, sizes) of the scales of a box of elements; None where the box cuts blocks, or is not theirs."""
        if isinstance(self.block, Elements):
            pieces = pieces_of([(offsets, sizes)], self.shape)
            if len(pieces) != 1 or pieces[0].rows != 1:
                return None
            first, after = self.scales_before(pieces[0].first), self.scales_before(pieces[0].stop)
            return None if first is None or after is None else ((first,), (after - first,))
        result: list[tuple[int, int]] = []
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            tile = {0: self.block.columns, 1: self.block.rows}.get(len(sizes) - 1 - dim, 1)
            end = offset + size
            if offset % tile or (end % tile and end != self.shape[dim]):
                return None
            result.append((offset // tile, -(-size // tile)))
        return tuple(a for a, _ in result), tuple(n for _, n in result)


AUTO = "auto"
COLUMNS = 256  # of a block of "auto"
LARGEST = 10**9 - 1  # rows, columns or elements of a block
_LEAST, _MOST = 16, 4096  # of one that is to divide something


def auto_block(shape: Sequence[int]) -> Elements | Tile:
    """The block that "auto" gives a tensor of this shape, wherever it is cut:

    two dimensions, or three with 16 columns       Tile(1, 256): inside a row
    more (convolutions)                            as many elements as divide all behind one index of the first one
    a vector, or where there is no such number     Elements(256)
    """
    if len(shape) == 2 or (len(shape) == 3 and shape[-1] >= _LEAST):
        return Tile(1, COLUMNS)
    return Elements((_divisor(math.prod(shape[1:])) if len(shape) > 2 else None) or COLUMNS)


def block_for(param: Param, block: Block | int | str = AUTO) -> Elements | Tile:
    """The block of a parameter's 8-bit states: ``block`` or, for "auto", `auto_block`.

    Where torch's Shard cuts another dimension than the first, or a vector, that may not fit. "auto" then takes blocks
    inside a row and, if rows are cut, of as many columns as divide every rank's share: up to 256 if at least 16, else
    up to 4096; raises ValueError if there is no such number. It looks at global metadata only.
    """
    if block != AUTO:
        return check_block(block)
    last, shares, dims = len(param.shape) - 1, list[int](), {0}
    for axis in cutting_axes(param.mesh, param.placements):
        placement = param.placements[axis]
        if isinstance(placement, SHARDS) and not isinstance(placement, RaggedShard):
            assert param.mesh is not None
            dims.add(placement.dim % len(param.shape))
            if placement.dim % len(param.shape) == last:
                shares.append(-(-(shares or param.shape)[-1] // param.mesh.size(axis)))
    if not shares or not param.numel:
        return Tile(1, COLUMNS) if max(dims) else auto_block(param.shape)
    common = math.gcd(*shares)
    count = _divisor(common)
    if count is None:
        raise _refusal(param, f"no block of 16 to 4096 elements divides the {common} between two cuts")
    return Tile(1, count) if last else Elements(count)


def _divisor(number: int) -> int | None:
    """The number of elements of a block that divides this one."""
    divisors = [n for n in range(min(_LEAST, number), min(number, _MOST) + 1) if n and number % n == 0]
    return max((n for n in divisors if n <= COLUMNS), default=divisors[0] if divisors else None)


def auto_blocks(shape: Sequence[int], scale_shape: Sequence[int]) -> set[Elements | Tile]:
    """The blocks with scales of this shape that "auto" may give a tensor of ``shape``, over all meshes."""
    blocks: set[Elements | Tile] = {auto_block(shape)}
    columns = shape[-1] if shape else 1
    kind = functools.partial(Tile, 1) if len(shape) > 1 else Elements
    blocks |= {kind(COLUMNS)} if len(shape) > 1 else set()
    for count in range(1, min(columns, _MOST) + 1):
        # Where n ranks share the columns the block divides ceil(columns / n), also if further axes cut that share.
        shares = (-(-columns // ranks) for ranks in range(2, columns // count + 2))
        if -(-columns // count) == scale_shape[-1] and any(share % count == 0 for share in shares):
            blocks.add(kind(count))
    return {block for block in blocks if Grid(tuple(shape), block).scale_shape == tuple(scale_shape)}


def check_block(block: Block | int | str) -> Elements | Tile:
    """``block`` if states can have it, also from its text or a number of elements; ValueError for another kind."""
    if isinstance(block, str):
        block = parse_block(block)
    elif isinstance(block, int) and not isinstance(block, bool) and block > 0:
        block = Elements(block)
    if not isinstance(block, (Elements, Tile)):
        raise ValueError(f"block={block!r}: 8-bit states have Elements(n) or Tile(rows, columns) blocks")
    if max(vars(block).values()) > LARGEST:
        raise ValueError(f"block={block!r}: expected at most {LARGEST} rows, columns or elements")
    return block


@dataclass(frozen=True)
class ScaleLayout:
    """The blocks of one parameter on this rank, and the places of their scales."""

    grid: Grid  # of the global tensor
    slab: Grid  # grid of the part that other axes (tensor or expert parallelism) leave on this rank
    # start, stop: this rank's elements of the flattened slab
    start: int
    stop: int
    num_scales: int  # one for each block on this rank
    placements: tuple[Placement, ...]  # of the tensor of scales

    def wrap(self, param: Param, local: torch.Tensor) -> torch.Tensor:
        """The scales' global tensor around this rank's scales, flat."""
        ragged = any(isinstance(p, RaggedShard) for p in self.placements)
        shape = self.slab.scale_shape
        if ragged:
            local = local.view(-1, *shape[-1:]) if len(shape) > 1 else local
        else:
            local = local.view(local.numel() // max(math.prod(shape[1:]), 1), *shape[1:])
        return wrap_local(local, param.mesh, self.placements, self.grid.scale_shape, ragged)


def scale_layout(param: Param, block: Elements | Tile) -> ScaleLayout:
    """The grid of a parameter and the placements of its scales' tensor, which follow the parameter's.

    Raises ValueError, on all ranks, if some rank's elements begin inside a block, or are no run of a slab of blocks.
    """
    if isinstance(block, Tile) and len(param.shape) < 2:
        raise ValueError(f"{param.name}: {block} needs rows and columns, the shape is {tuple(param.shape)}")
    grid, mesh = Grid(tuple(param.shape), block), param.mesh
    cutting = cutting_axes(mesh, param.placements)
    if mesh is None or not cutting:
        replicas = (Replicate(),) * len(param.placements)
        return ScaleLayout(grid, grid, 0, math.prod(grid.shape), math.prod(grid.scale_shape), replicas)
    _ = param.holding  # refuses other placements
    along = [a for a in cutting if isinstance(param.placements[a], RaggedShard)]
    along = along or [a for a in cutting if type(param.placements[a]) is TorchStridedShard][:1]
    along = along or [a for a in cutting if param.placements[a] == Shard(0)][-1:]
    sizes = [1 if a in along else mesh.size(a) for a in range(mesh.ndim)]
    result = {where: _slab_at(param, grid, along, where) for where in itertools.product(*map(range, sizes))}
    units = {RaggedShard((0,), slab.lengths) for slab in result.values() if any(slab.lengths)}
    if along and len(units) > 1:
        raise _refusal(param, f"its axes leave ranks different numbers of blocks of {block}")
    own = mesh.get_coordinate()
    assert own is not None
    placements = _scale_placements(param, grid, along, units.pop().local_units if units else (1,))
    chunk = [Replicate() if a in along or isinstance(p, RaggedShard) else p for a, p in enumerate(placements)]
    for where, slab in result.items():
        if held_boxes(grid.scale_shape, mesh.shape, chunk, where) != slab.scales:
            raise _refusal(
                param, f"its axes cut through blocks of {block}, or leave ranks other ones than their share"
            )
    own_slab = result[tuple(0 if a in along else own[a] for a in range(mesh.ndim))]
    rank = own[along[0]] if along else 0
    start, stop = own_slab.cuts[rank : rank + 2]
    own_grid = Grid(own_slab.shape, block)
    return ScaleLayout(grid, own_grid, start, stop, own_slab.lengths[rank], placements)


@dataclass(frozen=True)
class _Slab:
    """The part of a tensor that the axes that cut first leave at one place."""

    # of the slab; its elements from ``cuts[r]`` to ``cuts[r + 1]`` belong to rank r of the last axis
    shape: tuple[int, ...]
    cuts: tuple[int, ...]
    lengths: tuple[int, ...]  # how many scales each of these ranks has
    # (offsets, sizes) of the box of scales; none where the slab is empty
    scales: tuple[Box, ...]


def _slab_at(param: Param, grid: Grid, along: Sequence[int], where: tuple[int, ...]) -> _Slab:
    mesh = param.mesh
    assert mesh is not None
    # An axis of size 1 cuts nothing, also if its placement refers to other axes.
    placements = [p if mesh.size(a) > 1 else Replicate() for a, p in enumerate(param.placements)]
    counts = []
    for rank in range(mesh.size(along[0]) if along else 1):
        there = tuple(rank if a in along else c for a, c in enumerate(where))
        boxes = held_boxes(grid.shape, mesh.shape, placements, there)
        counts.append(sum(math.prod(size) for _, size in boxes))
    cuts = tuple(itertools.accumulate(counts, initial=0))
    for axis in along:
        placements[axis] = Replicate()
    boxes = held_boxes(grid.shape, mesh.shape, placements, where)
    if not boxes:
        return _Slab((0,) * len(grid.shape), cuts, (0,) * len(counts), ())
    ((offsets, size),) = boxes
    slab, scales = Grid(size, grid.block), grid.scales_of(offsets, size)
    if scales is None:
        raise _refusal(param, f"its axes cut through blocks of {grid.block}")
    before = []
    for rank, cut in enumerate(cuts):
        before.append(slab.scales_before(cut))
        if before[-1] is None:
            block = grid.block
            ends = f"{block.count} elements" if isinstance(block, Elements) else f"{block.rows} rows"
            what = f"element {cut}" if size == grid.shape else f"element {cut} of a slab of shape {size}"
            raise ValueError(
                f"{param.name}: what rank {rank} holds begins at {what}, inside a block of "
                f"{grid.block} (shape {grid.shape} may be cut every {ends}). Shard with "
                "fully_shard(..., block_policy=AdamW8bit.block_policy())"
            )
    lengths = tuple(after - b for b, after in itertools.pairwise(x for x in before if x is not None))
    return _Slab(size, cuts, lengths, (scales,))


def _scale_placements(
    param: Param, grid: Grid, along: Sequence[int], units: Sequence[int]
) -> tuple[Placement, ...]:
    mesh = param.mesh
    assert mesh is not None
    dims, cutting = tuple(range(max(len(grid.scale_shape) - 1, 1))), cutting_axes(mesh, param.placements)
    rows = isinstance(grid.block, Tile) and grid.scale_shape[0] == grid.shape[0]  # torch's cuts are the same
    result: list[Placement] = []
    factor = 1
    for axis in reversed(range(mesh.ndim)):
        placement = param.placements[axis]
        if axis in along and type(placement) in SHARDS and rows:
            result.append(placement)
        elif axis in along:
            strided = isinstance(placement, (StridedRaggedShard, TorchStridedShard)) and factor > 1
            result.append(StridedRaggedShard(dims, units, factor) if strided else RaggedShard(dims, units))
        elif isinstance(placement, RaggedShard):  # on an axis of size 1
            result.append(RaggedShard(dims, [1]) if not along else Replicate())
        elif axis in cutting:
            result.append(placement)
            factor *= mesh.size(axis) if isinstance(placement, Shard) and placement.dim in dims else 1
        else:
            result.append(Replicate())
    return tuple(reversed(result))


def _refusal(param: Param, reason: str) -> ValueError:
    return ValueError(
        f"{param.name}: 8-bit states need a run of whole blocks on each rank, but with placements {param.placements} "
        f"{reason}"
    )
