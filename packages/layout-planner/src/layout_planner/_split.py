"""The choice of tensors that share a segment.

In one buffer the longest tensors force the shard size onto the least common multiple of all their blocks. If
those have no small common multiple, several buffers with their own shard sizes pad less:

    one segment                  S a multiple of lcm(3, 7) = 21
    two segments                 S0 a multiple of 3, S1 of 7

Method. Combine the forced grids in every way (set partitions, lowest estimate first), let every other tensor join
the segment where it costs least, pack each segment, and keep the cheapest split; then move single tensors between
segments while that helps. A segment costs its padded size plus `segment_cost`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar

from layout_planner._bound import round_up
from layout_planner._pack import Packing, pack
from layout_planner._place import Item

T = TypeVar("T")

_MAX_GRIDS = 6  # 203 ways to combine them
_MAX_PARTITIONS = 12  # of these that are packed
_MAX_MOVES = 8  # of single tensors
_ENOUGH = 1 << 12  # padding below 1 / _ENOUGH is not worth a search


@dataclass
class _Planner:
    """Packs subsets of the items, and each subset only once."""

    items: Sequence[Item]
    world_size: int
    align: int
    segment_cost: int

    def __post_init__(self) -> None:
        self._packed: dict[tuple[int, ...], Packing] = {}

    def pack(self, members: Sequence[Item]) -> Packing:
        key = tuple(sorted(item.index for item in members))
        if key not in self._packed:
            self._packed[key] = pack(members, self.world_size, self.align, thorough=False)
        return self._packed[key]

    def cost(self, segments: Sequence[Sequence[Item]]) -> int:
        return sum(self.world_size * self.pack(members).shard + self.segment_cost for members in segments)


def split(
    items: Sequence[Item], world_size: int, align: int, segment_cost: int, max_segments: int
) -> list[Packing]:
    """Segments for these items, largest first, with the least total cost found."""
    single = pack(items, world_size, align, thorough=True)
    total = sum(map(attrgetter("size"), items))
    if max_segments == 1 or world_size * single.shard - total <= max(segment_cost, total // _ENOUGH):
        return [single]
    planner = _Planner(items, world_size, align, segment_cost)
    best: list[list[Item]] = [list(items)]
    least = world_size * single.shard + segment_cost
    for segments in _seeds(planner, max_segments, least):
        if (cost := planner.cost(segments)) < least:
            best, least = segments, cost
    best = _move(planner, best)
    if len(best) == 1:
        return [single]
    packed = [pack(members, world_size, align, thorough=True) for members in best]
    return sorted(packed, key=lambda packing: (-packing.shard, packing.items[0].index))


def _seeds(planner: _Planner, max_segments: int, least: int) -> Iterator[list[list[Item]]]:
    """Splits to pack: the cheapest ways to combine the grids of the long tensors, then of all tensors."""
    fluid = sum(item.size for item in planner.items) // planner.world_size
    long = [item for item in planner.items if item.spec.grid.numel > 2 * fluid]
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for items in (long, planner.items):
        steps: dict[int, list[Item]] = {}
        for item in items:
            steps.setdefault(_step(item), []).append(item)
        largest = sorted(steps.values(), key=lambda members: -sum(item.size for item in members))[:_MAX_GRIDS]
        seeds = []
        for combined in _partitions(largest):
            if 0 < len(combined) <= max_segments:
                flat = [[item for members in grids for item in members] for grids in combined]
                estimate = sum(_Draft(members, planner.world_size, straddle=False).shard for members in flat)
                if planner.world_size * estimate + planner.segment_cost * len(flat) < least:
                    seeds.append((estimate, len(flat), flat))
        seeds.sort(key=lambda seed: seed[:2])
        for straddle, join in ((True, _join), (False, _join), (False, _fill)):
            for _, _, flat in seeds[:_MAX_PARTITIONS]:
                start = [_Draft(list(members), planner.world_size, straddle=straddle) for members in flat]
                joined = join(planner, start, max_segments)
                key = tuple(sorted(tuple(sorted(item.index for item in members)) for members in joined))
                if key not in seen:
                    seen.add(key)
                    yield joined


class _Draft:
    """A segment in the making, with an estimate of its shard size from its forced grids and its elements."""

    def __init__(self, items: list[Item], world_size: int, *, straddle: bool) -> None:
        self.items = items
        self.straddle = straddle  # whether an item may lie across one boundary instead of forcing its grid
        self.world_size = world_size
        self.step = math.lcm(*(_step(item) for item in items))
        self.used = sum(item.size for item in items)
        self.shard = round_up(-(-self.used // world_size), self.step)

    def with_item(self, item: Item) -> tuple[int, int]:
        """Step and shard size if the item joined."""
        rest = self.shard % _step(item)
        fits = rest == 0 or item.size <= self.shard + (self.shard - rest if self.straddle else 0)
        step = self.step if fits else math.lcm(self.step, _step(item))
        return step, round_up(max(self.shard, -(-(self.used + item.size) // self.world_size)), step)

    def add(self, item: Item) -> None:
        self.step, self.shard = self.with_item(item)
        self.used += item.size
        self.items.append(item)


def _join(planner: _Planner, drafts: list[_Draft], max_segments: int) -> list[list[Item]]:
    """Add every remaining item, largest first, to the segment where it adds least, or to a new one."""
    placed = {item.index for draft in drafts for item in draft.items}
    for item in sorted(planner.items, key=lambda item: -item.size):
        if item.index in placed:
            continue
        alone = _Draft([item], planner.world_size, straddle=False)
        best = min(drafts, key=lambda draft: draft.with_item(item)[1] - draft.shard)
        added = best.with_item(item)[1] - best.shard
        if len(drafts) < max_segments and planner.world_size * (added - alone.shard) > planner.segment_cost:
            drafts.append(alone)
        else:
            best.add(item)
    return [draft.items for draft in drafts]


def _fill(planner: _Planner, drafts: list[_Draft], max_segments: int) -> list[list[Item]]:
    """Add to each segment the items that cost nothing there, largest first; the others share one more segment."""
    if len(drafts) == max_segments:
        return _join(planner, drafts, max_segments)
    placed = {item.index for draft in drafts for item in draft.items}
    rest = []
    for item in sorted(planner.items, key=lambda item: -item.size):
        if item.index in placed:
            continue
        free = next((draft for draft in drafts if draft.with_item(item) == (draft.step, draft.shard)), None)
        if free:
            free.add(item)
        else:
            rest.append(item)
    return [draft.items for draft in drafts] + ([rest] if rest else [])


def _move(planner: _Planner, segments: list[list[Item]]) -> list[list[Item]]:
    """Move single items, one of each kind and largest first, to other segments while that lowers the cost."""
    total = sum(item.size for item in planner.items)
    kinds = {item.kind: item for item in planner.items}.values()
    tried = 0
    for item in sorted(kinds, key=lambda item: -item.size):
        cost = planner.cost(segments)
        for other in range(len(segments)):
            if item in segments[other] or cost - total <= total // _ENOUGH + planner.segment_cost:
                continue
            moved = [[i for i in members if i is not item] for members in segments]
            moved[other].append(item)
            tried += 1
            if tried > _MAX_MOVES:
                return segments
            moved = [members for members in moved if members]
            if planner.cost(moved) < cost:
                segments = moved
                break
    return segments


def _step(item: Item) -> int:
    """Divisor of the shard size if the item is long."""
    return item.step or math.lcm(item.spec.grid.period, item.align)


def _partitions(items: list[T]) -> Iterator[list[list[T]]]:
    """All set partitions of the items, coarsest first for each leading item."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for subsets in _partitions(rest):
        for index, subset in enumerate(subsets):
            yield [*subsets[:index], [first, *subset], *subsets[index + 1 :]]
        yield [[first], *subsets]
