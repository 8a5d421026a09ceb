"""Which shard sizes are worth trying.

The least feasible S is the load of some rank, hence a sum of whole blocks (`Sums`). And a tensor longer than
2S has two boundaries inside it, one S apart, so S is a multiple of its block. Sizes that fail
either are never the least one.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from layout_planner._place import Item

_MAX_SUM_BITS = 1 << 16  # beyond so many units of the gcd, nearly every sum of blocks is reachable anyhow
_COARSE_MULTIPLES = 4


class Sums:
    """Which sizes are a sum of whole blocks of these items, as one big integer of bits."""

    def __init__(self, items: Sequence[Item], align: int) -> None:
        parts: Counter[int] = Counter()
        for item in items:
            step = item.step or align
            parts[step] += item.spec.grid.numel // step
            parts[-(-(item.spec.grid.numel % step) // align) * align] += 1
        del parts[0]
        self._parts = parts
        self._unit = math.gcd(*parts)
        self._bits, self._limit = 1, 0

    def reachable(self, size: int) -> bool:
        """Whether `size` can be a rank's load. True where telling would cost more than trying."""
        place, rest = divmod(size, self._unit)
        if rest or place >= _MAX_SUM_BITS:
            return not rest
        if place > self._limit:
            self._fill(min(2 * place + 64, _MAX_SUM_BITS))
        return bool(self._bits >> place & 1)

    def _fill(self, limit: int) -> None:
        mask, bits = (1 << limit + 1) - 1, 1
        for part, count in self._parts.items():
            shift, batch = part // self._unit, 1
            while count and shift * batch <= limit:  # 1, 2, 4, ... of them and then the rest
                batch = min(batch, count)
                bits |= bits << shift * batch & mask
                count -= batch
                batch *= 2
        self._bits, self._limit = bits, limit


def candidates(items: Sequence[Item], align: int, start: int, stop: int | None = None) -> Iterator[int]:
    """All sizes in [start, stop) that can be the least one, ascending."""
    longest = _by_length(items)
    sums = Sums(items, align)
    while stop is None or start < stop:
        step, end = align, stop
        for item in longest:  # those that force their grids at this size
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
    """A few sizes above `start` of every scale, the last of which always fits: everything on one rank.

    Multiples of the grids of the 1, 2, ... longest tensors, and steps of one part in 32.
    """
    total = sum(item.size for item in items)
    found, step = {total}, align
    for item in _by_length(items):
        step = math.lcm(step, item.step)
        if step > total:
            break
        first = -(-start // step)
        found.update(step * (first + more) for more in range(_COARSE_MULTIPLES))
    growth = start
    while growth < total:
        growth += -(-growth // (32 * align)) * align
        found.add(growth)
    return sorted(size for size in found if start < size <= total)


def _by_length(items: Sequence[Item]) -> list[Item]:
    kinds = {item.kind: item for item in items if item.step}
    return sorted(kinds.values(), key=lambda item: -item.spec.grid.numel)
