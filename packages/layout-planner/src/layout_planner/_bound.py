"""Lower bounds: how small the buffers of a group can possibly be.

Two arguments, each valid for every order and every split into segments. T is the number of elements that a rank
holds in all segments together.

* **blocks**: a rank holds whole blocks. Without the conditions on order and contiguity this is bin packing: blocks
  into `world_size` bins of size T. The dual feasible functions of Fekete and Schepers (Math. Program. 91, 2001)
  prove many T too small.
* **grids**: a tensor longer than 2T has at least two shard boundaries inside it, one shard size apart, so the
  shard size of its segment is a multiple of its block. For every way to combine such tensors in segments, sum
  the least multiples that hold them; if the best sum is above T, T is too small.

Both are monotone: if T is too small, so is every smaller one. So the least T that is not refuted is found by
bisection for the first, and for the second by stepping over the lengths at which a tensor becomes "long".
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from layout_planner._spec import TensorSpec

_MAX_LONG = 10  # tensors combined in every way; leaving out the shorter ones only weakens the bound
_MAX_ORDER = 24  # dual feasible functions tried per size


@dataclass(frozen=True)
class Bound:
    """A proven lower bound.

    Attributes:
        numel: elements of all segments' buffers that every layout of this group needs at least.
        reason: the argument that proves it: "elements", "blocks" or "grids".
    """

    numel: int
    reason: str


def lower_bound(tensors: Sequence[TensorSpec], world_size: int, align: int) -> Bound:
    """The best of the two bounds and the number of elements."""
    fluid = _fluid(tensors, world_size, align)
    bounds = {
        "elements": fluid,
        "blocks": blocks_bound(tensors, world_size, align),
        "grids": _grids_bound(tensors, world_size, align, fluid),
    }
    reason = max(bounds, key=lambda name: bounds[name])  # of equals the first, which is the simplest argument
    return Bound(world_size * bounds[reason], reason)


def effective_block(spec: TensorSpec, align: int) -> int:
    """Elements between the cut points of a uniform grid that a shard boundary can use: the aligned ones."""
    return math.lcm(spec.grid.block, align)


def _pieces(tensors: Sequence[TensorSpec], align: int) -> Counter[int]:
    """Lengths of indivisible runs and how many there are of each; never longer than in truth, sometimes shorter."""
    pieces: Counter[int] = Counter()
    for spec in tensors:
        period = spec.grid.period
        if period % align and not spec.grid.uniform:
            continue  # cut points and alignment coincide only every few periods: counted as elements, not blocks
        block = effective_block(spec, align)
        periods = spec.numel // period
        pieces[block] += periods * (period // block)
        pieces[round_up(period % block, align)] += periods
    del pieces[0]
    return +pieces


def _fluid(tensors: Sequence[TensorSpec], world_size: int, align: int) -> int:
    return round_up(-(-sum([round_up(spec.numel, align) for spec in tensors]) // world_size), align)


def blocks_bound(tensors: Sequence[TensorSpec], bins: int, align: int) -> int:
    """The least multiple of `align` with room for all elements that no dual feasible function refutes."""
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
    """Whether some dual feasible function proves that the pieces do not fit into `bins` bins of this capacity.

    f(x) = x/c if (k+1)x/c is an integer, else floor((k+1)x/c)/k: any set that fits into a bin has sum f <= 1.
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
        # Valid only while this tensor is long, so the bound is capped at half its length.
        least = max(least, min(_best_together(tuple(long), world_size), round_up(-(-spec.numel // 2), align)))
    return least


@lru_cache(maxsize=4096)
def _best_together(tensors: tuple[tuple[int, int], ...], world_size: int) -> int:
    """The least sum of shard sizes over all ways to combine tensors, given as (block, numel), in segments.

    Depth first, cheapest addition first. Adding a tensor never makes its segment's shard smaller, so a branch ends
    as soon as it costs as much as the best solution.
    """
    best = sum(round_up(-(-numel // world_size), block) for block, numel in tensors)

    def shard(segment: tuple[int, int]) -> int:
        return round_up(-(-segment[1] // world_size), segment[0])

    def add(index: int, segments: tuple[tuple[int, int], ...], cost: int) -> None:
        nonlocal best
        if cost >= best:
            return
        if index == len(tensors):
            best = cost
            return
        block, numel = tensors[index]
        choices = []
        for segment in {*segments, (1, 0)}:  # (1, 0): a separate segment
            joined = (math.lcm(segment[0], block), segment[1] + numel)
            choices.append((shard(joined) - shard(segment), segment, joined))
        for more, segment, joined in sorted(choices):
            rest = list(segments)
            if segment[1]:
                rest.remove(segment)
            add(index + 1, (*rest, joined), cost + more)

    add(0, (), 0)
    return best


def round_up(size: int, step: int) -> int:
    """The next multiple of a step."""
    return -(-size // step) * step
