"""Which units stay gathered between forward and backward within a memory budget. Arithmetic on one lean step.

    lean step    every unit is freed after forward, none is gathered ahead  -> Mark, Mark, ...
    replay       the same marks, some units kept, some gathered ahead       -> peak bytes, seconds
    predictions  replays of all choices worth a look
    best         the fastest one that fits

Units of equal size take the same from the budget while they are kept, and the last in forward are kept for the
shortest time: of each size only the first so many in backward's order are looked at. That is exact where sizes repeat,
as layers do; where there are more than `_EXACT` combinations of sizes, only the last so many units of all are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod
from typing import Literal

What = Literal["enter", "leave", "backward", "done"]
WHATS: tuple[What, ...] = ("enter", "leave", "backward", "done")
_DEPTHS = (0, 1, 2, 3)
_EXACT = 1024
_GRAIN = 1000  # steps that differ by less than this part of the lean one are equally fast


@dataclass(frozen=True)
class Mark:
    """A unit's forward or backward begins or has ended.

    Attributes:
        what, unit: the event, and the unit's number.
        live: the most bytes of all that is live, from here to the next mark.
        seconds: of the model's own computation up to there.
    """

    what: What
    unit: int
    live: int
    seconds: float


@dataclass(frozen=True)
class Cost:
    """A unit's bytes while it is gathered, and the seconds of a gather that nothing hides."""

    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Choice:
    """What may be chosen, and what is expected of it.

    Attributes:
        kept: numbers of the units that stay gathered between forward and backward, as backward needs them.
        depth: how many units are gathered ahead.
        peak: bytes.
        seconds: of forward and backward.
        saved: seconds of gathers that are not made, whether or not anything waited for them.
    """

    kept: tuple[int, ...]
    depth: int
    peak: int
    seconds: float
    saved: float


def predictions(marks: Sequence[Mark], costs: Sequence[Cost]) -> list[Choice]:
    """What each choice worth a look would take. The first is the lean step itself."""
    lean, _ = _replay(marks, costs, frozenset(), 0)
    others = [mark.live - gathered for mark, gathered in zip(marks, lean, strict=True)]
    found = []
    for kept in _candidates(marks, costs):
        for depth in _DEPTHS:
            gathered, seconds = _replay(marks, costs, frozenset(kept), depth)
            peak = max(map(sum, zip(others, gathered, strict=True)))
            found.append(Choice(kept, depth, peak, seconds, sum(costs[unit].seconds for unit in kept)))
    return found


def best(choices: Sequence[Choice], budget: int) -> Choice | None:
    """The fastest choice of at most `budget` bytes; of equally fast ones that with the least gathering, then bytes."""
    grain = choices[0].seconds / _GRAIN
    fitting = [choice for choice in choices if choice.peak <= budget]
    return min(
        fitting,
        key=lambda choice: (
            int(choice.seconds / grain) if grain else 0,
            -choice.saved,
            choice.peak,
            choice.depth,
        ),
        default=None,
    )


def _candidates(marks: Sequence[Mark], costs: Sequence[Cost]) -> list[tuple[int, ...]]:
    order = list(dict.fromkeys(mark.unit for mark in marks if mark.what == "backward"))
    sizes: dict[int, list[int]] = {}
    for unit in order:
        sizes.setdefault(costs[unit].nbytes, []).append(unit)
    if prod(len(units) + 1 for units in sizes.values()) > _EXACT:
        return [tuple(order[:count]) for count in range(len(order) + 1)]
    counts = product(*(range(len(units) + 1) for units in sizes.values()))
    firsts = [[units[:n] for units, n in zip(sizes.values(), taken, strict=True)] for taken in counts]
    return [tuple(sorted(chain.from_iterable(parts), key=order.index)) for parts in firsts]


def _replay(
    marks: Sequence[Mark], costs: Sequence[Cost], kept: frozenset[int], depth: int
) -> tuple[list[int], float]:
    """Bytes of gathered units from each mark on, and the seconds of the step. Gathers follow one another."""
    there: dict[int, float] = {}  # gathered, or on its way: when it comes
    used: set[int] = set()
    lived: list[int] = []
    clock = wire = 0.0
    live = 0

    def gather(unit: int) -> None:
        nonlocal wire, live
        wire = there[unit] = max(clock, wire) + costs[unit].seconds
        live += costs[unit].nbytes

    orders = {what: [mark.unit for mark in marks if mark.what == what] for what in ("enter", "backward")}
    passed = dict.fromkeys(orders, 0)
    for mark in marks:
        unit = mark.unit
        if mark.what in orders:
            passed[mark.what] += 1
            if unit not in there:
                gather(unit)
            clock = max(clock, there[unit])
            used.add(unit)
            ahead = 0
            for other in orders[mark.what][passed[mark.what] :]:
                if ahead == depth:
                    break
                if other in used:
                    continue
                ahead += 1
                if other not in there:
                    gather(other)
        elif unit in there and (mark.what == "done" or unit not in kept):
            del there[unit]
            used.discard(unit)
            live -= costs[unit].nbytes
        lived.append(live)
        clock += mark.seconds
    return lived, clock
