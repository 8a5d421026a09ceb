"""Possible starts of a tensor for a shard size. "Items" is bin packing's word for tensors.

        room                S                   S
    |--------|---------------------|---------------------|
    pos      boundary              boundary
         [   d   |  a tensor of a few shards    ]            d: elements before the first boundary

A tensor that fits into the room starts at pos. Any other starts d elements before a boundary, where d is one of
its cut points (0: on the boundary); the largest d gives the earliest start. That is optimal for a given order
and shard size: starting a tensor later never lets the next one start earlier.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from layout_planner._blocks import BlockGrid
from layout_planner._spec import TensorSpec

_MAX_CUTS = 4096  # cut points tried for one start, on grids with periods

# Earliest feasible start at or after an aligned position, or -1 if there is none.
Placer = Callable[[int], int]


@dataclass(frozen=True, eq=False, slots=True)
class Item:
    """A tensor to place, with everything that placement needs computed once."""

    index: int  # its position in the given order
    spec: TensorSpec
    align: int
    size: int  # elements, rounded up to the alignment, since the next tensor starts aligned
    step: int  # elements between cut points that a boundary can use; 0 if the grid is not uniform
    kind: tuple[int, int, int]  # equal for items that are interchangeable in any layout

    @classmethod
    def of(cls, index: int, spec: TensorSpec, align: int) -> "Item":
        """The item of a tensor."""
        grid = spec.grid
        size = -(-grid.numel // align) * align
        step = math.lcm(grid.block, align) if grid.uniform else 0
        return cls(index, spec, align, size, step, (grid.numel, grid.block, grid.period))


def placer(item: Item, shard: int) -> Placer:
    """A function that places this item in shards of this size, which is a multiple of the item's alignment."""
    if item.step:
        return _uniform(item.spec.grid.numel, item.step, shard)
    return _periodic(item.spec.grid, item.align, shard)


def _uniform(numel: int, step: int, shard: int) -> Placer:
    spans = shard % step == 0  # then any number of boundaries may lie inside
    longest = shard - shard % step  # the most that can lie before the first boundary

    def place(position: int) -> int:
        room = shard - position % shard
        if numel <= room:
            return position
        before = room - room % step
        if spans or (before and numel - before <= shard):
            return position + room - before
        if numel <= shard:
            return position + room
        if longest and numel - longest <= shard:
            return position + room + shard - longest
        return -1

    return place


def _periodic(grid: BlockGrid, align: int, shard: int) -> Placer:
    # The boundaries inside a long tensor hit every multiple of gcd(S, period) within a period. The period is not
    # a multiple of the block, so those cannot all be cut points unless S is a multiple of the period.
    cycle = grid.period // math.gcd(shard, grid.period)
    hopeless = cycle > 1 and -(-grid.numel // shard) - 1 >= cycle
    memo: dict[int, int] = {}

    def largest(room: int) -> int:
        """The largest d <= room with a cut point at every boundary inside the tensor, or -1 if none was found."""
        if room not in memo:
            previous = -1
            for before in () if hopeless else _cuts_down(grid, align, room):
                if all(grid.is_cut(at) for at in range(before, grid.numel, shard)):
                    previous = before
                    break
            memo[room] = previous
        return memo[room]

    def place(position: int) -> int:
        room = shard - position % shard
        if grid.numel <= room:
            return position
        before = largest(room)
        if before >= 0:
            return position + room - before
        if grid.numel <= shard:
            return position + room
        before = largest(shard)
        return position + room + shard - before if before >= 0 else -1

    return place


def _cuts_down(grid: BlockGrid, align: int, room: int) -> Iterator[int]:
    """Aligned cut points from `room` (less than the tensor) down to 0; gives up after `_MAX_CUTS`."""
    start, looked = room - room % grid.period, 0
    while start >= 0:
        cut = start + (min(room, start + grid.period - 1) - start) // grid.block * grid.block
        while cut >= start:
            if cut % align == 0:
                yield cut
            looked += 1
            if looked == _MAX_CUTS:
                return
            cut -= grid.block
        start -= grid.period
