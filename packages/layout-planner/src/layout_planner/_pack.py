"""One segment: the order, the offsets and the shard size of tensors that share a buffer.

Problem. Find an order, offsets and the least S such that every tensor is contiguous, every boundary kS that
falls inside a tensor is one of its cut points, S and all offsets are multiples of `align`, and all tensors end
within `world_size * S`. With two ranks and tensors that may not be cut this is Partition, so finding the order
is NP-hard.

Method.
1. For a given S and order, put each tensor at its earliest feasible start (`_place`). That is optimal.
2. For a given S, find the best order by dynamic programming over the set of tensors placed so far, treating equal
   tensors as interchangeable: for each set only the least possible end matters. If that has too many states, try
   the given order, by block, by size, and small tensors as fillers, then a bounded local search.
3. Try the sizes that can be the least one (`_sizes`) from a lower bound upwards until one is feasible, since
   feasibility is not monotone in S: first with the fixed orders, then with step 2 those sizes that failed.

Exact unless a limit on the number of steps ends a search. Never bounded by time, so every process finds the same.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from layout_planner._bound import blocks_bound
from layout_planner._place import Item, Placer, placer
from layout_planner._sizes import candidates, coarse

_MAX_STATES = 1 << 12  # of the exact order; a Llama layer has 216
_MAX_PLACEMENTS = 60_000  # spent on exact orders and local search, per segment
_MAX_QUICK = 8_000  # placements spent on fixed orders just above the bound, and again below a size that fits
_SIZES = range(6, 48)  # but at least and at most this many shard sizes


@dataclass(frozen=True)
class Packing:
    """A segment: its shard size and, in buffer order, its items and their offsets."""

    shard: int
    items: tuple[Item, ...]
    offsets: tuple[int, ...]


def pack(items: Sequence[Item], world_size: int, align: int, *, thorough: bool) -> Packing:
    """Pack the items into one buffer of equal shards with the least shard size that the search finds.

    Items are in the order to keep unless another one pads less. Unless `thorough`, which searches for orders exactly or
    locally, only the fixed orders are tried.
    """
    by_index = sorted(items, key=attrgetter("index"))
    if packed := _at_once(by_index, world_size, align):
        return packed
    start = blocks_bound([item.spec for item in items], world_size, align)
    best, failed = _quick(items, world_size, align, start)
    if thorough:
        best = _improve(items, world_size, best, failed)
    return in_order(by_index, best.shard, world_size) or best


def _at_once(items: Sequence[Item], world_size: int, align: int) -> Packing | None:
    """The given order at a size that nothing can be below, if it fits there.

    A rank holds its share of all elements at least; and at a size below half of a tensor's length, the size is a
    multiple of the tensor's step.
    """
    share = -(-sum(map(attrgetter("size"), items)) // world_size)
    step, shortest = align, math.inf
    for item in items:
        if item.step and item.spec.numel > 2 * share:
            step, shortest = math.lcm(step, item.step), min(shortest, item.spec.numel)
    shard = -(-share // step) * step
    return in_order(items, shard, world_size) if shortest > 2 * shard else None


def _quick(items: Sequence[Item], world_size: int, align: int, start: int) -> tuple[Packing, list[int]]:
    """The least size tried at which a fixed order fits, and the smaller ones at which none did."""
    orders = _fixed_orders(items)
    tries = min(max(_MAX_QUICK // (len(orders) * len(items)), _SIZES.start), _SIZES.stop)
    failed: list[int] = []

    def first_fit(sizes: Iterable[int]) -> Packing | None:
        for shard in sizes:
            for order in orders:
                if packed := in_order(order, shard, world_size):
                    return packed
            failed.append(shard)
        return None

    if placers := first_fit(islice(candidates(items, align, start), tries)):
        return placers, failed
    far = first_fit(coarse(items, align, failed[-1]))
    assert far is not None, "the last size has room for everything on one rank"
    low = failed[-1] + align
    stride = -(-(far.shard - low) // (tries * align)) * align
    spread = (
        next(candidates(items, align, at, at + stride), 0) for at in range(low, far.shard, stride or align)
    )
    return first_fit(size for size in spread if 0 < size < far.shard) or far, failed


def _improve(items: Sequence[Item], world_size: int, best: Packing, failed: list[int]) -> Packing:
    """Search for an order at the sizes where the fixed orders failed, smallest first, within the budget."""
    kinds = Counter(item.kind for item in items)
    states = math.prod(count + 1 for count in kinds.values())
    cost = states * len(kinds) if states <= _MAX_STATES else len(items) ** 2
    search = _exact if states <= _MAX_STATES else _local
    for shard in sorted(failed)[: max(1, _MAX_PLACEMENTS // cost)]:
        if shard >= best.shard:
            break
        if packed := search(items, shard, world_size):
            return packed
    return best


def _fixed_orders(items: Sequence[Item]) -> list[list[Item]]:
    """The given order first; then by block, by size, and large tensors with small ones as fillers in between."""
    by_index = sorted(items, key=lambda item: item.index)
    by_block = sorted(by_index, key=lambda item: (-(item.step or item.spec.grid.period), -item.size))
    by_size = sorted(by_index, key=lambda item: -item.size)
    large, small = by_size[: (len(by_size) + 1) // 2], by_size[(len(by_size) + 1) // 2 :]
    filled = [item for pair in zip(large, small, strict=False) for item in pair] + large[len(small) :]
    tried = (filled, by_size[::-1], by_size, by_block, by_index)
    orders = {tuple(item.index for item in order): order for order in tried}
    return list(orders.values())[::-1]


def _placers(items: Iterable[Item], shard: int) -> dict[tuple[int, int, int], Placer]:
    return {kind: placer(item, shard) for kind, item in {item.kind: item for item in items}.items()}


def in_order(order: Sequence[Item], shard: int, world_size: int) -> Packing | None:
    """The packing of this order with this shard size, or None if it does not fit."""
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
    """The packing with the least end over all orders, or None if no order fits.

    A state says how many items of each kind are placed, as one mixed-radix number. Placing an item adds its kind's
    weight, so in ascending order every state comes after all states that lead to it.
    """
    by_kind: dict[tuple[int, int, int], list[Item]] = {}
    for item in items:
        by_kind.setdefault(item.kind, []).append(item)
    placers = _placers(items, shard)
    kinds, states = [], 1
    for kind, members in by_kind.items():
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
    order, state, members_of = [], states - 1, list(by_kind.values())
    while state:
        weight, radix, _, _ = kinds[came[state]]
        order.append(members_of[came[state]][state // weight % radix - 1])
        state -= weight
    return in_order(order[::-1], shard, world_size)


def _local(items: Sequence[Item], shard: int, world_size: int) -> Packing | None:
    """Move one item after another to where the order ends earliest; None if no order found fits."""
    placers, limit = _placers(items, shard), world_size * shard

    def end_of(order: Sequence[Item]) -> int:
        end = 0
        for item in order:
            start = placers[item.kind](end)
            if start < 0:
                return 2 * limit + sum(item.size for item in items)
            end = start + item.size
        return end

    width = min(max(_MAX_QUICK // len(items), 4), 24)  # items moved, and positions tried for each
    order = min(_fixed_orders(items), key=end_of)
    for item in sorted(items, key=lambda item: -item.size)[:width]:
        rest = [other for other in order if other is not item]
        positions = range(0, len(order), -(-len(order) // width))
        order = min(([*rest[:at], item, *rest[at:]] for at in positions), key=end_of)
        if end_of(order) <= limit:
            return in_order(order, shard, world_size)
    return None
