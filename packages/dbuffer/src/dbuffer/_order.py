"""Checks that all ranks of a process group start the same collectives in the same order.

Torch's collectives carry no name. If ranks start two of equal size in different orders, each receives the wrong bytes
and nothing fails. So each rank predicts the next collective from those so far, by a rule that gives equal predictions
for equal histories:

as predicted            one comparison of strings; nothing else
nothing is predicted    all ranks compare its title, by an all-reduce of 16 bytes that the host reads
another than predicted  this rank publishes the title in the group's store, and starts when every rank has come to it
after an exception      the same: ranks go on together, and know nothing, if all have failed after as many collectives

Up to the first difference histories are equal, and so are predictions. There titles differ, so for one rank at least
its own is not as predicted: it waits for the others, before it has started anything. They have started what was
predicted, and look at the store once in a second that the host waits for it: then all raise. On a device the host
does not wait, so that the others' collective, and the first rank, end at the group's timeout.

DBUFFER_COMPARE is "first" (as above), "always" (all titles are compared: every rank raises at the first difference) or
"never".
"""

import contextlib
import hashlib
import logging
import os
import time
import weakref
from collections.abc import Iterable
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ragged_shard.device import DeviceLayer
from ragged_shard.dist import gather_from_ranks, list_ranks

from . import _torch_compat as compat
from .transport.protocol import Work

_log = logging.getLogger("dbuffer.order")
COMPARE_VARIABLE = "DBUFFER_COMPARE"
_MODES = ("first", "always", "never")
_END = "the end of a pass"
_LATE = 10.0  # seconds after which a rank that waits for the others says so
_LOOK = 1.0  # seconds that the host waits for a collective before it looks whether another rank does something else
_DEPARTED = "departed"  # key of the last departure: "<number> <rank> <title>"
_MOST = 4096  # passes that are remembered
_REMEDY = (
    "Run the same modules in the same order on all ranks, declare those that ranks may skip with "
    "fully_shard(skippable=True), and continue from the last checkpoint"
)
Titles = tuple[str, ...]


class DisagreementError(RuntimeError):
    """The ranks of a group were about to start different collectives. None of theirs has started here."""


def compare_mode() -> str:
    """How titles are compared, from the environment. Raises ValueError: an unknown mode."""
    mode = os.environ.get(COMPARE_VARIABLE) or _MODES[0]
    if mode not in _MODES:
        raise ValueError(f"{COMPARE_VARIABLE} is {mode!r}; expected one of {', '.join(_MODES)}")
    return mode


class CollectiveOrder:
    """The order of the collectives that this process starts on one process group.

    Args:
        group: the process group.
        store: shared by its ranks.

    Attributes:
        titles: those of the pass under way.
        number: number of collectives started or announced.
    """

    def __init__(self, group: dist.ProcessGroup, store: Store) -> None:
        self.titles: list[str] = []
        self.number = 0
        self._group = weakref.ref(group)  # the registry must not keep groups alive
        self._rank, self._ranks = group.rank(), dist.get_process_group_ranks(group)
        self._store = PrefixStore("dbuffer-order", store)
        self._mode = compare_mode()
        self._departed = 0  # the number at which this rank departed last
        self._expected: Titles | None = None
        self._cut = False  # whether an exception ended a pass, perhaps on this rank only
        self._last: Titles | None = None  # the pass before
        self._passes: dict[Titles, None] = {}
        # After each pass: the one that followed, and how often in a row.
        self._following: dict[Titles | None, tuple[Titles, int]] = {}
        # By both: what followed; for example after three backwards without a reduction, one with it.
        self._turns: dict[tuple[Titles | None, Titles, int], Titles] = {}

    def start(self, title: str, layer: DeviceLayer) -> None:
        """Check the next collective. Call it before that starts.

        Args:
            layer: of the device that the collective runs on.

        Raises:
            DisagreementError: another rank starts a different one.
        """
        at, expected = len(self.titles), self._expected
        self.titles.append(title)
        self.number += 1
        if self._cut and self._mode != "never":
            self._depart(f"{title}, after an exception", "what follows on other ranks", layer)
            self._cut = False
        elif self._mode == "first" and expected is not None:
            if at >= len(expected) or expected[at] != title:
                self._depart(title, "nothing" if at >= len(expected) else expected[at], layer)
        elif self._mode != "never":
            self.compare(title, layer)

    def end_pass(self, layer: DeviceLayer) -> None:
        """End a sequence of collectives, and predict the next one. Call it at the same places on every rank.

        Raises:
            DisagreementError: another rank starts one more collective.
        """
        if self._expected is not None and len(self.titles) < len(self._expected):
            self.start(_END, layer)
            self.titles.pop()
        titles = tuple(self.titles)
        self.titles = []
        if len(self._passes) >= _MOST or len(self._turns) >= _MOST:  # on all ranks at once
            self._forget()
        self._passes[titles] = None
        if (followed := self._following.get(self._last)) is not None:
            last, times = followed
            self._turns[self._last, last, times] = titles
            times = min(times + 1, _MOST) if last == titles else 1
        else:
            times = 1
        self._following[self._last] = (titles, times)
        self._last = titles
        self._expected = None
        if (followed := self._following.get(titles)) is not None:
            self._expected = self._turns.get((titles, *followed), followed[0])

    def cut_off(self) -> None:
        """An exception has ended the pass under way: other ranks may predict something else from now on."""
        self.titles, self._cut = [], True
        self._forget()

    def _forget(self) -> None:
        self._expected = self._last = None
        for known in (self._passes, self._following, self._turns):
            known.clear()

    def compare(self, title: str, layer: DeviceLayer) -> None:
        """Compare a text with all ranks: one all-reduce of 16 bytes that the host waits for.

        Raises:
            DisagreementError: on every rank, with a text that differs from this rank's; or another rank departs.
        """
        group = self._group()
        if self._mode == "never" or layer.capturing or group is None:
            return
        mark = int.from_bytes(hashlib.sha256(title.encode()).digest()[:8], "big") >> 2
        both = torch.tensor([mark, -mark], dtype=torch.int64, device=layer.device)
        work = dist.all_reduce(both, dist.ReduceOp.MAX, group=group, async_op=not layer.asynchronous)
        if work is not None:
            wait_in_order(work, group)
        high, low = both.tolist()
        if high == -low:
            return
        for rank, other in gather_from_ranks((dist.get_rank(), title), [group]):
            if other != title:
                self._refuse(title, rank, other)
        raise AssertionError("digests differ, yet all titles are equal to this rank's")

    def _refuse(self, title: str, rank: int, other: str) -> NoReturn:
        place = f"as number {len(self.titles)} of a pass " if self.titles else ""
        raise DisagreementError(
            f"the ranks do not agree on the order of collectives: {place}rank {self._ranks[self._rank]} starts "
            f"{title}, rank {rank} {other}. {_REMEDY}"
        )

    def _depart(self, title: str, expected: str, layer: DeviceLayer) -> None:
        """Start something else than predicted: once every rank has published the same title for this number."""
        group = self._group()
        if layer.capturing or group is None:
            return
        counter = f"{self.number} {hashlib.sha256(title.encode()).hexdigest()[:16]}"
        own = f"{self.number}/{self._rank}"
        self._departed = self.number
        self._store.set(own, title)
        self._store.set(_DEPARTED, f"{self.number} {self._rank} {title}")
        self._store.add(counter, 1)
        begun, late = time.monotonic(), False
        patience = compat.timeout_seconds(group, layer.device)
        pause = 0.0005
        while self._store.add(counter, 0) < len(self._ranks):
            waited = time.monotonic() - begun
            if waited > 0.1:
                self._check_others(title)
            if waited > patience:
                raise DisagreementError(
                    f"the ranks do not agree on the order of collectives: rank {self._ranks[self._rank]} starts "
                    f"{title} where {expected} was expected, and in {patience:g} s not all of "
                    f"{list_ranks(self._ranks)} have come to that. {_REMEDY}"
                )
            if waited > _LATE and not late:
                late = True
                _log.warning(
                    "rank %s starts %s where %s was expected; waiting for the other ranks to do the same",
                    self._ranks[self._rank], title, expected,
                )  # fmt: skip
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        self._store.delete_key(own)
        if self._store.add(counter, 1) == 2 * len(self._ranks):
            self._store.delete_key(counter)
            if self._store.get(_DEPARTED).startswith(f"{self.number} ".encode()):
                # A later process group may have the same store. Without the key a rank's `get` would block.
                self._store.set(_DEPARTED, "0 0 ")
        begun_with = tuple(self.titles)
        self._expected = next((p for p in self._passes if p[: len(begun_with)] == begun_with), None)

    def _check_others(self, title: str) -> None:
        """Raise DisagreementError if another rank has published a different title for this number."""
        for place, rank in enumerate(self._ranks):
            key = f"{self.number}/{place}"
            if place != self._rank and self._store.check([key]):
                other = self._store.get(key).decode()
                if other != title:
                    self._refuse(title, rank, other)

    def check_departures(self) -> None:
        """Raise DisagreementError if another rank has departed at a collective that this one started as predicted.

        One or two requests of the store.
        """
        if not self._store.check([_DEPARTED]):
            return
        number, place, title = self._store.get(_DEPARTED).decode().split(" ", 2)
        if not self._departed < int(number) <= self.number:
            return
        started = self.number - int(number)  # since then
        own = self.titles[-1 - started] if started < len(self.titles) else "what was predicted"
        self._store.set(f"{number}/{self._rank}", own)  # the other rank raises too
        self._refuse(own, self._ranks[int(place)], title)


def wait_in_order(work: Work, group: dist.ProcessGroup | None) -> None:
    """Block the host until a collective of a group has completed; raises if another rank starts something else.

    Raises:
        DisagreementError: it does. The collective is under way still.
        RuntimeError: the collective failed.
    """
    order = None if group is None else watched.get(group)
    if order is None:
        work.wait()
        return
    while not compat.wait_for(work, _LOOK):
        with contextlib.suppress(dist.DistError):  # the store is gone: the collective will fail too
            order.check_departures()


watched: "weakref.WeakKeyDictionary[dist.ProcessGroup, CollectiveOrder]" = weakref.WeakKeyDictionary()


def watch_order(group: dist.ProcessGroup) -> CollectiveOrder | None:
    """Check the order of the collectives that this process starts on a group. Does not communicate.

    Returns:
        the same object at each call; None for one rank, torch's fake group, or a process group without a store.
    """
    known = watched.get(group)
    if known is None and group.size() > 1 and not compat.is_fake(group):
        store = group.get_group_store()
        if store is not None:
            known = watched[group] = CollectiveOrder(group, store)
    return known


def start_collective(groups: Iterable[dist.ProcessGroup], title: str, layer: DeviceLayer) -> None:
    """`CollectiveOrder.start` for collectives of torch's own, on each of these groups that is watched."""
    for group in groups:
        if (order := watched.get(group)) is not None:
            order.start(title, layer)
