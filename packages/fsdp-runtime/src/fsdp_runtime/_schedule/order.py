"""The order in which units run, and from it which to gather ahead.

first pass      A, B, C: each gathered on demand; the order is written down
later passes    A runs: B is gathered ahead;  B runs: C ...
another order   A, C: what is not next is looked for further on (B was skipped); not found: on demand.
                The new order is what the next pass goes by.
"""

from typing import Generic, TypeVar

U = TypeVar("U")


class Schedule(Generic[U]):
    """The order of one kind of pass (forward from one root, or backward)."""

    def __init__(self) -> None:
        self._known: list[U] = []
        self._seen: list[U] = []
        self._next = 0
        self._lost = False

    @property
    def seen(self) -> list[U]:
        """The units of the pass under way, in order."""
        return self._seen

    def begin(self, expected: list[U] | None = None) -> None:
        """Start a pass; `expected` replaces the order known from before."""
        if expected is not None:
            self._known = expected
        self._seen = []
        self._next = 0
        self._lost = False

    def enter(self, unit: U) -> None:
        """A unit runs."""
        self._seen.append(unit)
        try:
            self._next = self._known.index(unit, self._next) + 1
        except ValueError:
            self._lost = True  # what comes next is unknown until something expected runs
        else:
            self._lost = False

    def upcoming(self) -> list[U]:
        """What is expected after the unit that entered last, soonest first."""
        return [] if self._lost else self._known[self._next :]

    def end(self) -> None:
        """The pass has ended: go by its order from now on."""
        self._known, self._seen, self._next = self._seen, [], 0
