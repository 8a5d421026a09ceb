"""Shard sizes that are worth trying.

The least feasible S is the load of some rank, so it is a sum of whole blocks (`Sums`). A tensor longer than 2S
has two boundaries inside it, S apart, so S is a multiple of its block. A size that fails either test is never
the least one.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter

from layout_planner._place import Item

_MAX_SUM_BITS = 1 << 16  # beyond this many multiples of the gcd nearly every size is a sum of blocks
_COARSE_MULTIPLES = 4


class Sums:
    """Sizes that are a sum of whole blocks of these items: bit k of one big integer stands for k * gcd."""

    def __init__(self, items: Sequence[Item], align: int) -> None:
        blocks: Counter[int] = Counter()
        for item in items:
            step = item.step or align
            blocks[step] += item.spec.grid.numel // step
            blocks[-(-(item.spec.grid.numel % step) // align) * align] += 1
        del blocks[0]
        self._blocks = blocks
        self._gcd = math.gcd(*blocks)
        self._bits, self._limit = 1, 0

    def reachable(self, size: int) -> bool:
        """Whether `size` can be a rank's load. True if finding out would cost more than trying the size."""
        bit, rest = divmod(size, self._gcd)
        if rest or bit >= _MAX_SUM_BITS:
            return not rest
        if bit > self._limit:
            self._fill(min(2 * bit + 64, _MAX_SUM_BITS))
        return bool(self._bits >> bit & 1)

    def _fill(self, limit: int) -> None:
        mask, bits = (1 << limit + 1) - 1, 1
        for block, count in self._blocks.items():
            shift, batch = block // self._gcd, 1
            while count and shift * batch <= limit:  # 1, 2, 4, ... of them and then the rest
                batch = min(batch, count)
                bits |= bits << shift * batch & mask
                count -= batch
                batch *= 2
        self._bits, self._limit = bits, limit


def candidates(items: Sequence[Item], align: int, start: int, stop: int | None = None) -> Iterator[int]:
    """All sizes in [start, stop) that can be the least feasible one, in ascending order."""
    longest = _by_length(items)
    sums = Sums(items, align)
    while stop is None or start < stop:
        step, end = align, stop
        for item in longest:  # those whose grid S must be a multiple of at this size
            if item.spec.grid.numel <= 2 * start:
                break
            step = math.lcm(step, item.step)
            half = -(-item.spec.grid.numel // 2)
            end = half if stop is None else min(half, stop)
        size = -(-start // step) * step
        while end is None or size < end:
            if sums.reachable(size):
                yield size
            size += step
        assert end is not None
        start = end


def coarse(items: Sequence[Item], align: int, start: int) -> list[int]:
    """A few sizes of every magnitude above `start`; the last one always fits, with everything on one rank.

    Multiples of the grids of the 1, 2, ... longest tensors, and steps of 1/32.
    """
    total = sum(item.size for item in items)
    sizes, step = {total}, align
    for item in _by_length(items):
        step = math.lcm(step, item.step)
        if step > total:
            break
        first = -(-start // step)
        sizes.update(step * (first + more) for more in range(_COARSE_MULTIPLES))
    growth = start
    while growth < total:
        growth += -(-growth // (32 * align)) * align
        sizes.add(growth)
    return sorted(size for size in sizes if start < size <= total)


def _by_length(items: Sequence[Item]) -> list[Item]:
    kinds = {item.kind: item for item in items if item.step}
    return sorted(kinds.values(), key=attrgetter("spec.numel"), reverse=True)
