"""Lower bounds: how small the buffers of a group could be at best.

Two arguments, each valid for every order and every split into segments. T is the elements a rank holds in
all segments together.

* **blocks**: a rank holds whole blocks. Forget order and contiguity: what is left is bin packing, blocks
  into `world_size` bins of T. The dual feasible functions of Fekete and Schepers (Math. Program. 91, 2001)
  prove many T too small.
* **grids**: a tensor longer than 2T has at least two shard boundaries inside it, one shard size apart, so
  the shard size of its segment is a multiple of its block. Over all ways to put such tensors together in
  segments, sum the least multiples that hold them; if the best sum is above T, T is too small.

Both prove monotonically: where T is too small, every smaller one is. So the least T not refuted is found by
bisection for the first and by stepping over the lengths at which a tensor becomes "long" for the second.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from layout_planner._spec import TensorSpec

T = TypeVar("T")

_MAX_LONG = 10  # tensors put together in every way; leaving out the shorter ones only weakens the bound
_MAX_ORDER = 24  # dual feasible functions tried per size


@dataclass(frozen=True)
class Bound:
    """A proven least size.

    Attributes:
        numel: elements in all segments' buffers that no layout of this group can go below.
        reason: the argument that proves it: "elements", "blocks" or "grids".
    """

    numel: int
    reason: str


def lower_bound(tensors: Sequence[TensorSpec], world_size: int, align: int) -> Bound:
    """The best of the two bounds and of the plain count of elements."""
    fluid = _fluid(tensors, world_size, align)
    found = {
        "elements": fluid,
        "blocks": blocks_bound(tensors, world_size, align),
        "grids": _grids_bound(tensors, world_size, align, fluid),
    }
    reason = max(found, key=lambda name: found[name])  # the first of equals, the plainest
    return Bound(world_size * found[reason], reason)


def effective_block(spec: TensorSpec, align: int) -> int:
    """Elements between the cut points of a uniform grid that a shard boundary can use: aligned ones."""
    return math.lcm(spec.grid.block, align)


def _pieces(tensors: Sequence[TensorSpec], align: int) -> Counter[int]:
    """Indivisible runs and how many there are of each length, shortened where that is simpler, never enlarged."""
    pieces: Counter[int] = Counter()
    for spec in tensors:
        period = spec.grid.period
        if period % align and not spec.grid.uniform:
            continue  # cut points and alignment interlock over many periods: counted as fluid only
        block = effective_block(spec, align)
        periods = spec.numel // period
        pieces[block] += periods * (period // block)
        pieces[_up(period % block, align)] += periods
    del pieces[0]
    return +pieces


def _fluid(tensors: Sequence[TensorSpec], world_size: int, align: int) -> int:
    return _up(-(-sum(_up(spec.numel, align) for spec in tensors) // world_size), align)


def blocks_bound(tensors: Sequence[TensorSpec], bins: int, align: int) -> int:
    """The least multiple of `align`, as large as the tensors ask for, that no dual feasible function refutes."""
    start = _fluid(tensors, bins, align)
    pieces = _pieces(tensors, align)
    if not pieces or not _too_small(pieces, bins, start):
        return start
    low, high = start // align, max(max(pieces), 2 * start) // align
    while _too_small(pieces, bins, high * align):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _too_small(pieces, bins, middle * align) else (low, middle)
    return high * align


def _too_small(pieces: Counter[int], bins: int, capacity: int) -> bool:
    """Whether some dual feasible function proves that the pieces do not fit `bins` bins of this capacity.

    f(x) = x/c where (k+1)x/c is an integer, else floor((k+1)x/c)/k: any set that fits a bin has sum f <= 1.
    """
    if max(pieces) > capacity:
        return True
    for k in range(1, _MAX_ORDER):
        weight = 0  # in units of 1 / (k * capacity)
        for size, count in pieces.items():
            whole, rest = divmod((k + 1) * size, capacity)
            weight += count * (k * size if rest == 0 else whole * capacity)
        if weight > bins * k * capacity:
            return True
    return False


def _grids_bound(tensors: Sequence[TensorSpec], world_size: int, align: int, start: int) -> int:
    """The least T not refuted by the tensors longer than 2T; see the module's docstring."""
    uniform = sorted((spec for spec in tensors if spec.grid.uniform), key=lambda spec: -spec.numel)
    least = start
    long: list[tuple[int, int]] = []
    for spec in uniform[:_MAX_LONG]:
        if spec.numel <= 2 * least:
            break
        long.append((effective_block(spec, align), spec.numel))
        # Valid while this tensor is long. Beyond that T is refuted no more, so half its length caps the claim.
        least = max(least, min(_best_together(tuple(long), world_size), _up(-(-spec.numel // 2), align)))
    return least


@lru_cache(maxsize=4096)
def _best_together(tensors: tuple[tuple[int, int], ...], world_size: int) -> int:
    """The least sum of shard sizes over all ways to put tensors, as (block, numel), together in segments.

    Depth first, cheapest addition first. Adding a tensor never makes its segment's shard smaller, so a branch
    ends where it costs what a whole solution does.
    """
    best = sum(_up(-(-numel // world_size), block) for block, numel in tensors)

    def shard(part: tuple[int, int]) -> int:
        return _up(-(-part[1] // world_size), part[0])

    def add(index: int, parts: tuple[tuple[int, int], ...], cost: int) -> None:
        nonlocal best
        if cost >= best:
            return
        if index == len(tensors):
            best = cost
            return
        block, numel = tensors[index]
        choices = []
        for part in {*parts, (1, 0)}:  # (1, 0): a segment of its own
            joined = (math.lcm(part[0], block), part[1] + numel)
            choices.append((shard(joined) - shard(part), part, joined))
        for more, part, joined in sorted(choices):
            rest = list(parts)
            if part[1]:
                rest.remove(part)
            add(index + 1, (*rest, joined), cost + more)

    add(0, (), 0)
    return best


def partitions(items: list[T]) -> Iterator[list[list[T]]]:
    """All ways to put the items together in parts, coarsest first for each leading item."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for parts in partitions(rest):
        for index, part in enumerate(parts):
            yield [*parts[:index], [first, *part], *parts[index + 1 :]]
        yield [[first], *parts]


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
