"""One segment: the order, offsets and least shard size for tensors that share a buffer.

Problem. Find an order, offsets and the least S such that every tensor is contiguous, every boundary kS that
falls inside a tensor is one of its cut points, S and all offsets are multiples of `align`, and all ends lie
within `world_size * S`. Two ranks and whole tensors make it Partition, so it is NP-hard in the order.

Method.
1. For a given S and order, put each tensor at its earliest feasible start (`_place`): optimal.
2. For a given S, the best order is exact by dynamic programming over which tensors are placed (equal ones
   counted, not told apart): of what is placed, only the least possible end matters. Where that has too many
   states: the given order, by block, by size, small tensors as fillers, then a bounded local search.
3. Sizes that can be the least one (`_sizes`) are tried from a lower bound upwards until one is feasible,
   since feasibility is not monotone in S: first with the fixed orders, then those that failed with 2.

Heuristic only where a count of steps cuts the search off. Never bounded by time: every process finds the same.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from layout_planner._bound import blocks_bound
from layout_planner._place import Item, Placer, placer
from layout_planner._sizes import candidates, coarse

_MAX_STATES = 1 << 12  # of the exact order; a Llama layer has 216
_MAX_PLACEMENTS = 60_000  # spent on exact orders and local search, per segment
_MAX_QUICK = 8_000  # placements spent on fixed orders just above the bound, and again below a size that fits
_SIZES = range(6, 48)  # but no fewer and no more shard sizes than this


@dataclass(frozen=True)
class Packing:
    """A segment: its shard size and, in buffer order, its items and their offsets."""

    shard: int
    items: tuple[Item, ...]
    offsets: tuple[int, ...]


def pack(items: Sequence[Item], world_size: int, align: int, *, thorough: bool) -> Packing:
    """Pack the items into one buffer of equal shards with the least shard size that the search finds.

    Args:
        items: in the order to keep where it is as good as any.
        world_size: shards.
        align: elements that shard size and offsets are multiples of.
        thorough: also search orders exactly or locally; without it only the fixed orders are tried.
    """
    start = blocks_bound([item.spec for item in items], world_size, align)
    best, failed = _quick(items, world_size, align, start)
    if thorough:
        best = _improve(items, world_size, best, failed)
    return _in_order(sorted(items, key=lambda item: item.index), best.shard, world_size) or best


def _quick(items: Sequence[Item], world_size: int, align: int, start: int) -> tuple[Packing, list[int]]:
    """The least size tried at which a fixed order fits, and the sizes below it at which none did."""
    orders = _fixed_orders(items)
    tries = min(max(_MAX_QUICK // (len(orders) * len(items)), _SIZES.start), _SIZES.stop)
    failed: list[int] = []

    def first_fit(sizes: Iterable[int]) -> Packing | None:
        for shard in sizes:
            for order in orders:
                if found := _in_order(order, shard, world_size):
                    return found
            failed.append(shard)
        return None

    if found := first_fit(islice(candidates(items, align, start), tries)):
        return found, failed
    far = first_fit(coarse(items, align, failed[-1]))
    assert far is not None, "everything on one rank always fits"
    low = failed[-1] + align
    stride = -(-(far.shard - low) // (tries * align)) * align
    spread = (
        next(candidates(items, align, at, at + stride), 0) for at in range(low, far.shard, stride or align)
    )
    return first_fit(size for size in spread if 0 < size < far.shard) or far, failed


def _improve(items: Sequence[Item], world_size: int, best: Packing, failed: list[int]) -> Packing:
    """Look for a better order at the sizes where the fixed orders failed, smallest first, within the budget."""
    kinds = Counter(item.kind for item in items)
    states = math.prod(count + 1 for count in kinds.values())
    cost = states * len(kinds) if states <= _MAX_STATES else len(items) ** 2
    search = _exact if states <= _MAX_STATES else _local
    for shard in sorted(failed)[: max(1, _MAX_PLACEMENTS // cost)]:
        if shard >= best.shard:
            break
        if found := search(items, shard, world_size):
            return found
    return best


def _fixed_orders(items: Sequence[Item]) -> list[list[Item]]:
    """The given order first; then by block, by size, and large tensors with small ones as fillers between."""
    given = sorted(items, key=lambda item: item.index)
    by_block = sorted(given, key=lambda item: (-(item.step or item.spec.grid.period), -item.size))
    by_size = sorted(given, key=lambda item: -item.size)
    large, small = by_size[: (len(by_size) + 1) // 2], by_size[(len(by_size) + 1) // 2 :]
    filled = [item for pair in zip(large, small, strict=False) for item in pair] + large[len(small) :]
    orders = {
        tuple(item.index for item in order): order
        for order in (filled, by_size[::-1], by_size, by_block, given)
    }
    return list(orders.values())[::-1]


def _placers(items: Iterable[Item], shard: int) -> dict[tuple[int, int, int], Placer]:
    return {kind: placer(item, shard) for kind, item in {item.kind: item for item in items}.items()}


def _in_order(order: Sequence[Item], shard: int, world_size: int) -> Packing | None:
    """The packing of this order with this shard size, or None where it does not fit."""
    placers, end, limit = _placers(order, shard), 0, world_size * shard
    offsets = []
    for item in order:
        start = placers[item.kind](end)
        end = start + item.size
        if start < 0 or end > limit:
            return None
        offsets.append(start)
    return Packing(shard, tuple(order), tuple(offsets))


def _exact(items: Sequence[Item], shard: int, world_size: int) -> Packing | None:
    """The packing with the least end over all orders, or None where no order fits.

    A state is how many items of each kind are placed, as one mixed-radix number. Placing an item adds its
    kind's weight, so going up through the numbers meets every state after all that lead to it.
    """
    groups: dict[tuple[int, int, int], list[Item]] = {}
    for item in items:
        groups.setdefault(item.kind, []).append(item)
    placers = _placers(items, shard)
    kinds, states = [], 1
    for kind, members in groups.items():
        kinds.append((states, len(members) + 1, placers[kind], members[0].size))
        states *= len(members) + 1
    limit = world_size * shard
    ends, came = [limit + 1] * states, [-1] * states
    ends[0] = 0
    for state in range(states):
        end = ends[state]
        if end > limit:
            continue
        for number, (weight, radix, place, size) in enumerate(kinds):
            if state // weight % radix == radix - 1:
                continue
            start = place(end)
            if start >= 0 and start + size < ends[state + weight]:
                ends[state + weight], came[state + weight] = start + size, number
    if ends[-1] > limit:
        return None
    order, state, waiting = [], states - 1, list(groups.values())
    while state:
        weight, radix, _, _ = kinds[came[state]]
        order.append(waiting[came[state]][state // weight % radix - 1])
        state -= weight
    return _in_order(order[::-1], shard, world_size)


def _local(items: Sequence[Item], shard: int, world_size: int) -> Packing | None:
    """Take each item in turn out of the order and put it where the end comes earliest; None where none fits."""
    placers, limit = _placers(items, shard), world_size * shard

    def end_of(order: Sequence[Item]) -> int:
        end = 0
        for item in order:
            start = placers[item.kind](end)
            if start < 0:
                return 2 * limit + sum(item.size for item in items)
            end = start + item.size
        return end

    width = min(max(_MAX_QUICK // len(items), 4), 24)  # items moved, and places tried for each
    order = min(_fixed_orders(items), key=end_of)
    for item in sorted(items, key=lambda item: -item.size)[:width]:
        rest = [other for other in order if other is not item]
        places = range(0, len(order), -(-len(order) // width))
        order = min(([*rest[:at], item, *rest[at:]] for at in places), key=end_of)
        if end_of(order) <= limit:
            return _in_order(order, shard, world_size)
    return None
