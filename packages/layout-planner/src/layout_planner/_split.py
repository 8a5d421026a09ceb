"""Which tensors share a segment.

On one buffer the longest tensors force the shard size onto the least common multiple of all their blocks.
Where those share no small multiple, several buffers, each with a shard size of its own, pad less:

    one segment                  S a multiple of lcm(3, 7) = 21
    two segments                 S0 a multiple of 3, S1 of 7

Method. Put the grids that are forced together in every way (set partitions, cheapest estimate first), let
each other tensor join where it costs least, pack each part, keep the best; then move single tensors between
segments while that helps. The cost of a segment is its padded size plus `segment_cost`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from layout_planner._bound import partitions
from layout_planner._pack import Packing, pack
from layout_planner._place import Item

_MAX_GRIDS = 6  # 203 ways to put together
_MAX_PARTITIONS = 12  # of them packed
_MAX_MOVES = 8  # of single tensors
_ENOUGH = 1 << 12  # padding of less than one part in so many is not worth a search


@dataclass
class _Planner:
    """Packs subsets of the items, each subset once."""

    items: Sequence[Item]
    world_size: int
    align: int
    segment_cost: int

    def __post_init__(self) -> None:
        self._packed: dict[tuple[int, ...], Packing] = {}

    def pack(self, part: Sequence[Item]) -> Packing:
        key = tuple(sorted(item.index for item in part))
        if key not in self._packed:
            self._packed[key] = pack(part, self.world_size, self.align, thorough=False)
        return self._packed[key]

    def cost(self, parts: Sequence[Sequence[Item]]) -> int:
        return sum(self.world_size * self.pack(part).shard + self.segment_cost for part in parts)


def split(
    items: Sequence[Item], world_size: int, align: int, segment_cost: int, max_segments: int
) -> list[Packing]:
    """Segments for these items, the largest first, of the least total cost found."""
    planner = _Planner(items, world_size, align, segment_cost)
    whole = pack(items, world_size, align, thorough=True)
    total = sum(item.size for item in items)
    if max_segments == 1 or world_size * whole.shard - total <= max(segment_cost, total // _ENOUGH):
        return [whole]
    best: list[list[Item]] = [list(items)]
    least = world_size * whole.shard + segment_cost
    for parts in _seeds(planner, max_segments, least):
        if (cost := planner.cost(parts)) < least:
            best, least = parts, cost
    best = _move(planner, best)
    if len(best) == 1:
        return [whole]
    packed = [pack(part, world_size, align, thorough=True) for part in best]
    return sorted(packed, key=lambda packing: (-packing.shard, packing.items[0].index))


def _seeds(planner: _Planner, max_segments: int, least: int) -> Iterator[list[list[Item]]]:
    """Complete splits: the cheapest ways to put grids together, those of long tensors and then those of all."""
    fluid = sum(item.size for item in planner.items) // planner.world_size
    long = [item for item in planner.items if item.spec.grid.numel > 2 * fluid]
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for items in (long, planner.items):
        steps: dict[int, list[Item]] = {}
        for item in items:
            steps.setdefault(_step(item), []).append(item)
        largest = sorted(steps.values(), key=lambda members: -sum(item.size for item in members))[:_MAX_GRIDS]
        seeds = []
        for parts in partitions(largest):
            if 0 < len(parts) <= max_segments:
                flat = [[item for members in part for item in members] for part in parts]
                estimate = sum(_Part(part, planner.world_size, straddle=False).shard for part in flat)
                if planner.world_size * estimate + planner.segment_cost * len(flat) < least:
                    seeds.append((estimate, len(flat), flat))
        seeds.sort(key=lambda seed: seed[:2])
        for straddle, join in ((True, _join), (False, _join), (False, _fill)):
            for _, _, flat in seeds[:_MAX_PARTITIONS]:
                start = [_Part(list(part), planner.world_size, straddle=straddle) for part in flat]
                joined = join(planner, start, max_segments)
                key = tuple(sorted(tuple(sorted(item.index for item in part)) for part in joined))
                if key not in seen:
                    seen.add(key)
                    yield joined


class _Part:
    """An estimate of a segment in the making: the shard size that its forced grids and its elements ask for."""

    def __init__(self, items: list[Item], world_size: int, *, straddle: bool) -> None:
        self.items = items
        self.straddle = straddle  # whether an item may lie across one boundary rather than force its grid
        self.world_size = world_size
        self.step = math.lcm(*(_step(item) for item in items))
        self.used = sum(item.size for item in items)
        self.shard = _up(-(-self.used // world_size), self.step)

    def with_item(self, item: Item) -> tuple[int, int]:
        """The step and the shard size if the item joined."""
        rest = self.shard % _step(item)
        fits = rest == 0 or item.size <= self.shard + (self.shard - rest if self.straddle else 0)
        step = self.step if fits else math.lcm(self.step, _step(item))
        return step, _up(max(self.shard, -(-(self.used + item.size) // self.world_size)), step)

    def add(self, item: Item) -> None:
        self.step, self.shard = self.with_item(item)
        self.used += item.size
        self.items.append(item)


def _join(planner: _Planner, parts: list[_Part], max_segments: int) -> list[list[Item]]:
    """Let every item that is in no part yet, the largest first, join where it adds least, or open a new one."""
    placed = {item.index for part in parts for item in part.items}
    for item in sorted(planner.items, key=lambda item: -item.size):
        if item.index in placed:
            continue
        alone = _Part([item], planner.world_size, straddle=False)
        best = min(parts, key=lambda part: part.with_item(item)[1] - part.shard)
        added = best.with_item(item)[1] - best.shard
        if len(parts) < max_segments and planner.world_size * (added - alone.shard) > planner.segment_cost:
            parts.append(alone)
        else:
            best.add(item)
    return [part.items for part in parts]


def _fill(planner: _Planner, parts: list[_Part], max_segments: int) -> list[list[Item]]:
    """Fill the parts with what costs nothing there, the largest first; all else shares one more segment."""
    if len(parts) == max_segments:
        return _join(planner, parts, max_segments)
    placed = {item.index for part in parts for item in part.items}
    rest = []
    for item in sorted(planner.items, key=lambda item: -item.size):
        if item.index in placed:
            continue
        free = next((part for part in parts if part.with_item(item) == (part.step, part.shard)), None)
        if free:
            free.add(item)
        else:
            rest.append(item)
    return [part.items for part in parts] + ([rest] if rest else [])


def _move(planner: _Planner, parts: list[list[Item]]) -> list[list[Item]]:
    """Move single items, the largest of each kind first, to another segment while that costs less; bounded."""
    total = sum(item.size for item in planner.items)
    kinds = {item.kind: item for item in planner.items}.values()
    tried = 0
    for item in sorted(kinds, key=lambda item: -item.size):
        cost = planner.cost(parts)
        for other in range(len(parts)):
            if item in parts[other] or cost - total <= total // _ENOUGH + planner.segment_cost:
                continue
            moved = [[i for i in part if i is not item] for part in parts]
            moved[other].append(item)
            tried += 1
            if tried > _MAX_MOVES:
                return parts
            moved = [part for part in moved if part]
            if planner.cost(moved) < cost:
                parts = moved
                break
    return parts


def _step(item: Item) -> int:
    """What the shard size is a multiple of where the item is long."""
    return item.step or math.lcm(item.spec.grid.period, item.align)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
