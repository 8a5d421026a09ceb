"""Checks that all ranks of a process group start the same collectives in the same order.

Torch's collectives carry no name. If ranks start two of equal size in different orders, each receives the wrong bytes
and nothing fails. So each rank records the titles of its collectives, and `compare` publishes them in the process
group's store. An order is published once; a pass that repeats it takes one request of the store.

titles --compare--> published --every rank published it--> agreed
                      |--every rank published one since, and not all this one--> RuntimeError
                      '--a collective started later has completed, and not every rank published it--> RuntimeError

That collective has completed on this rank, so every rank has started it, and has published its order before.

Each rank expects the order that followed the last one before, also if orders alternate. A rank that departs from
it, to a new order or another known one, announces its collective before it starts it. When that has completed,
every rank has started its counterpart, and has announced it if it departed too. So at the end of the same pass a
rank that departed sees whether all ranks departed to the same collective, and the others see that one did: all
raise. A pass as expected announces nothing.

With torch's own collectives a rank that departs also waits, some seconds at most, until every rank has announced the
same collective (`meet`). So ranks that differ raise before they exchange anything: buffers of different sizes end
the process with gloo, and hang with NCCL. In the first few passes every collective is announced that way.

After an exception in a pass ranks may expect different orders. The next pass is compared by its titles alone.
"""

import hashlib
import logging
import time
import weakref
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ragged_shard.device import DeviceLayer

from . import _torch_compat as compat
from ._patient_calls import PatientStore

_log = logging.getLogger("dbuffer.order")
_NAMED = 64  # ranks that an error compares this one's order with
_NOTHING = "nothing"
_END = (
    "parameters gathered and gradients reduced since are wrong on every rank: run the same modules in the same order "
    "on all ranks, and continue from the last checkpoint"
)
_PATIENCE = 10.0  # seconds that a request of the store may take
_WAITING = 2.0  # the same, of a rank that waits or whose collective has failed
_MEETING = 10.0  # seconds that a rank which departs waits for the others, once in a pass if they do not come
_ASKING = 1.0  # of them, before it asks for the others' waits
_MET = 8  # new orders of a model that are announced at each collective, by groups of at most _NAMED ranks
_MOST = 256  # orders of a model that are written to the store, which keeps them all


class DisagreementError(RuntimeError):
    """The ranks of a group were about to start different collectives. None of theirs has started here."""


@dataclass
class _Published:
    """An order that some ranks may not have published yet.

    Attributes:
        titles: titles of the collectives.
        scope: name under which it was published.
        key: counter in the store of the ranks that have published it.
        number: number of collectives started by then.
        witness: the event of a later collective that this rank waited for, in a list of one; or empty.
    """

    titles: tuple[str, ...]
    scope: str
    key: str
    number: int
    witness: list[Any]


@dataclass(frozen=True)
class _Departure:
    """An unexpected collective that this rank has started.

    Attributes:
        key: entry of the store with the last rank that departed, and its collective.
        counter: counter in the store of the ranks that departed to this collective, plus ranks that saw all of them.
        number: number of collectives started by then, with this one.
        title: title of the collective.
    """

    key: str
    counter: str
    number: int
    title: str


@dataclass
class _Scope:
    """Orders that this rank has published under one name, with their numbers; and the orders that all ranks have."""

    published: dict[tuple[str, ...], int] = field(default_factory=dict)
    agreed: set[tuple[str, ...]] = field(default_factory=set)
    # after each order: the order that followed the last time, and how often in a row
    following: dict[tuple[str, ...], tuple[tuple[str, ...], int]] = field(default_factory=dict)
    # by both: the order that followed; for example after three backwards without a reduction, one with it
    turns: dict[tuple[tuple[str, ...], tuple[str, ...], int], tuple[str, ...]] = field(default_factory=dict)
    departures: int = 0  # of this rank, since the last pass that failed


class CollectiveOrder:
    """The order of the collectives that the `DBuffer`s of this process start on one process group.

    Args:
        ranks: ranks of the group, as ranks of the whole job.
        rank: index of this process in them.
        store: a store shared by them.

    Attributes:
        titles: titles of the collectives started since the last `compare`. Appended to by each launch.
        number: number of collectives started.
        completed: number of the last one that this rank waited for, and the device's event at the end of the wait.
        expected: a published order that begins with `titles`, as far as known; if it does not, `depart` is called.
        unmet: the last collective in `titles`, if it was announced and other ranks may not have announced it.
    """

    def __init__(self, ranks: Sequence[int], rank: int, store: Store) -> None:
        self.titles: list[str] = []
        self.number = 0
        self.completed: tuple[int, Any] = (0, None)
        self._ranks, self._rank = list(ranks), rank
        shared = PrefixStore("dbuffer-order", store)
        self._store: PatientStore | None = PatientStore(shared, _PATIENCE)
        self._asked = PatientStore(shared, _WAITING)
        self._scopes = {"": _Scope()}
        self._scope = ""
        self._waiting: list[_Published] = []
        self.expected: tuple[str, ...] = ()
        self._before: tuple[str, ...] = ()  # the order compared last
        self._unknown = False  # whether no published order begins with `titles`
        self._departures: list[_Departure] = []  # departures that other ranks may not share
        self.unmet: _Departure | None = None
        self._alone = False  # other ranks did not come to a meeting in this pass
        self._discards = 0
        self._failure = ""  # the last failed pass after which the ranks agree again
        self._failed_at: int | None = (
            None  # a pass failed after so many collectives; the ranks' orders may differ
        )

    def begin(self, scope: str) -> None:
        """Drop the titles since the last `compare`, and publish later orders under `scope`, a name equal on all ranks.

        An order known under one name is published again under another. Pending orders of other names are checked when
        they recur: their model may have failed.
        """
        self._waiting = [published for published in self._waiting if published.scope == scope]
        self._departures = []
        self._scope = scope
        self._scopes.setdefault(scope, _Scope())
        self._begin_sequence(())

    def agree(self, facts: Iterable[str], layer: DeviceLayer, patience: float) -> None:
        """Compare texts that are the same on ranks which start the same collectives after this call; see `compare`."""
        self.titles.extend(facts)
        self.number += len(self.titles)
        self.compare(layer, patience)

    def compare(self, layer: DeviceLayer, patience: float = 0.0) -> None:
        """End a sequence of collectives that every rank starts in one order, and check this and earlier ones.

        Every rank calls this at the same points of its program, and after a failed pass only when it has waited for
        the same collectives as the others. A sequence that is new takes five requests of the process group's store
        (some hundred bytes, and the titles compressed), more while this waits, and one at each further call until all
        ranks are known to have it; any other takes one. Nothing while a graph is captured, and for new ones after 256:
        a model that draws new layers in each pass would fill the store.

        Args:
            layer: of the device that the collectives run on.
            patience: seconds to wait for the others' orders, where this sequence is new. Without, a difference
                shows in a later call, after collectives that were started since.

        Raises:
            RuntimeError: another rank started other collectives, or the same in another order.
        """
        if self.titles and len(self.expected) > len(self.titles):
            self._announce(layer, _NOTHING, len(self.titles) + 1, self.number + 1)
        started = tuple(self.titles)
        scope = self._scopes[self._scope]
        if started:
            if len(scope.turns) >= 16 * _MOST:  # on all ranks at once
                scope.following.clear()
                scope.turns.clear()
            last, times = scope.following.get(self._before, ((), 0))
            scope.turns[self._before, last, times] = started
            scope.following[self._before] = (started, min(times + 1, _MOST) if started == last else 1)
            self._begin_sequence(started)
        new = (
            started
            and started not in scope.agreed
            and (len(scope.published) < _MOST or started in scope.published)
        )
        if self._store is None or layer.capturing:
            return
        difference = ""
        try:
            difference = self._check_departures(self._store, layer, started)
            latest = None
            if new and not difference:
                published = self._publish(self._store, started)
                if patience > 0 and self._all_published(self._store, published, patience):
                    latest = published
            if self._waiting and not difference:
                difference = self._check(self._store, layer, latest)
        except RuntimeError as error:
            self._give_up(error)
        if difference:
            raise RuntimeError(difference)

    def check_waiting(self) -> str:
        """Publish the collectives that this rank has started, since it waits for long; returns a difference, or "".

        Some requests of the store for each of the first 64 ranks. A rank that has not asked is not known to differ.
        """
        if self._store is None or self._discards:
            return ""
        store = self._asked
        started = (*self._before, *self.titles)
        first = self.number - len(started)
        try:
            if store.check(["failure"]):  # the ranks' numbers may differ
                return ""
            store.set(f"waiting/{self._rank}", "\n".join((str(first), *started)))
            for place, rank in enumerate(self._ranks[:_NAMED]):
                if place == self._rank or not store.check([f"waiting/{place}"]):
                    continue
                text, *others = store.get(f"waiting/{place}").decode().split("\n")
                shift = first - int(text)
                for at in range(max(0, -shift), min(len(started), len(others) - shift)):
                    if started[at] != others[at + shift]:
                        return self._waits_otherwise(started[at], rank, others[at + shift])
            if store.check([key := self._departure_key()]):  # a rank that waits where it cannot ask
                number, place, title = store.get(key).decode().split(" ", 2)
                at = int(number) - first - 1
                if 0 <= at < len(started) and started[at] != title and int(place) != self._rank:
                    return self._waits_otherwise(started[at], self._ranks[int(place)], title)
        except RuntimeError:  # the store is cut off, or its process is gone: the wait will fail
            return ""
        return ""

    def _waits_otherwise(self, own: str, rank: int, other: str) -> str:
        return (
            f"the ranks do not agree on the order of collectives: rank {self._ranks[self._rank]} started {own} where "
            f"rank {rank} started {other}; {_END}. A unit that only some ranks run needs fully_shard(skippable=True)"
        )

    def discard(self) -> None:
        """Drop the titles since the last `compare`: this rank's pass ended early, perhaps others' did not."""
        self._begin_sequence(())
        self._waiting, self._departures = [], []
        self._failed_at = self.number
        self._discards += 1
        if self._store is not None:
            try:
                self._store.set("failure", f"{self.number} {self._rank} {self._discards}")
                self._store.set(self._departure_key(), f"{self.number} {self._rank} an exception")
            except RuntimeError as error:
                self._give_up(error)

    def _begin_sequence(self, before: tuple[str, ...]) -> None:
        self.titles, self._unknown, self._before = [], False, before
        self._alone = False
        scope = self._scopes[self._scope]
        last, times = scope.following.get(before, ((), 0))
        self.expected = scope.turns.get((before, last, times), last)

    def _departure_key(self) -> str:
        return f"{self._scope}/{self._failure}/departure {self._scopes[self._scope].departures}"

    def depart(self, layer: DeviceLayer) -> None:
        """Announce the last collective in `titles`, which is not the expected one and has not started.

        Two requests of the store. A known order that begins with `titles` is expected from then on; without one nothing
        is, until the next `compare`. Of a new order every collective is announced, or only the first; see `_MET`.
        """
        scope, begun = self._scopes[self._scope], tuple(self.titles)
        if layer.capturing:
            return
        if self._unknown:
            if len(scope.published) >= _MET or len(self._ranks) > _NAMED:
                return
        else:
            known = next(
                (published for published in scope.published if published[: len(begun)] == begun), None
            )
            self._unknown = known is None
            if known is not None:
                self.expected = known
            elif len(scope.published) >= _MOST:
                return
        self.unmet = self._announce(layer, begun[-1], len(begun), self.number)

    def _announce(self, layer: DeviceLayer, title: str, at: int, number: int) -> _Departure | None:
        """Announce the collective with this number, at index `at` (from 1) of its sequence."""
        if self._store is None or self._failed_at is not None:
            return None
        key = self._departure_key()
        departure = _Departure(key, f"{key}/{at} {title}", number, title)
        try:
            self._store.set(key, f"{number} {self._rank} {title}")
            self._store.add(departure.counter, 1)
        except RuntimeError as error:
            self._give_up(error)
            return None
        self._scopes[self._scope].departures += 1
        self._departures.append(departure)
        return departure

    def meet(self) -> None:
        """Wait until every rank has announced the last collective in `titles`, which this rank has not started.

        Returns without that after `_MEETING` seconds: another rank may be late. Some requests of the store.

        Raises:
            DisagreementError: another rank has started a different one, or waits to.
        """
        departure, self.unmet = self.unmet, None
        end, pause, asks = time.monotonic() + _MEETING, 0.0005, time.monotonic() + _ASKING
        while departure is not None and self._store is not None and not self._alone:
            try:
                if self._all_departed(self._store, departure):
                    return
            except RuntimeError as error:
                self._give_up(error)
                return
            now = time.monotonic()
            if now > asks:
                if difference := self.check_waiting():
                    raise DisagreementError(difference)
                asks = now + _ASKING
            self._alone = now > end
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _all_departed(self, store: PatientStore, departure: _Departure) -> bool:
        """Whether all ranks have announced this collective. The last to see it deletes its keys."""
        if store.add(departure.counter, 0) < len(self._ranks):
            return False
        self._departures.remove(departure)
        if store.add(departure.counter, 1) == 2 * len(self._ranks):
            store.delete_key(departure.counter)
            store.delete_key(departure.key)
        return True

    def _check_departures(self, store: PatientStore, layer: DeviceLayer, started: tuple[str, ...]) -> str:
        """The error message if ranks depart from the expected order to different collectives, else an empty string."""
        difference = ""
        if self._failed_at is None:
            difference = self._departed_alone(store, layer, started)
            if not difference or not self._has_failed(store):
                return difference
        assert self._failed_at is not None
        number, event = self.completed
        if number > self._failed_at and self.number - len(started) >= self._failed_at:
            # Once a later collective has completed, every rank has begun a pass after the failed one. The host waits
            # for that, so that all ranks resume the comparison at the same call.
            layer.wait_on_host(event)
            self._failure, self._failed_at = store.get("failure").decode(), None
            self._departures = []
            for scope in self._scopes.values():
                scope.following.clear()
                scope.turns.clear()
                scope.departures = 0
            self._begin_sequence(())
        return ""

    def _departed_alone(self, store: PatientStore, layer: DeviceLayer, started: tuple[str, ...]) -> str:
        own_rank, first = (
            self._ranks[self._rank],
            self.number - len(started),
        )  # the number before the sequence
        number, event = self.completed
        for departure in self._departures.copy():
            if self._all_departed(store, departure):
                continue
            if number >= departure.number and layer.has_completed(event):
                return (
                    f"the ranks do not agree on the order of collectives: as number {departure.number - first} of a "
                    f"pass rank {own_rank} starts {departure.title}, and not all of ranks {self._ranks} do so; {_END}"
                )
        key = self._departure_key()
        if not store.check([key]):
            return ""
        text, place, title = store.get(key).decode().split(" ", 2)
        at = int(text) - first
        if at > len(started):
            return ""  # that rank is ahead
        ours = started[at - 1] if at > 0 else "another one"
        return (
            f"the ranks do not agree on the order of collectives: as number {max(at, 1)} of a pass rank {own_rank} "
            f"starts {ours}, rank {self._ranks[int(place)]} {title}; {_END}"
        )

    def _has_failed(self, store: PatientStore) -> bool:
        """Whether a rank's pass has failed since the last check, so that ranks with equal programs differ."""
        if self._failed_at is None and store.check(["failure"]):
            failure = store.get("failure").decode()
            if failure != self._failure:
                self._failed_at = int(failure.split()[0])
        return self._failed_at is not None

    def _give_up(self, error: RuntimeError) -> None:
        self._store = None
        _log.warning(
            "the order of collectives is no longer compared between ranks: the store failed: %s", error
        )

    def _publish(self, store: PatientStore, started: tuple[str, ...]) -> _Published:
        scope = self._scopes[self._scope]
        text = "\n".join(started).encode()
        key = f"{self._scope}/{hashlib.sha256(text).hexdigest()[:32]}"
        if started not in scope.published:
            number = scope.published[started] = len(scope.published)
            store.set(f"{self._scope}/rank {self._rank}/{number}", zlib.compress(text).hex())
            store.add(key, 1)
            store.add(f"{self._scope}/number {number}", 1)
            if number + 1 == _MOST:
                _log.warning(
                    "the order of collectives changes in each pass: new orders are no longer compared between ranks"
                )
        published = next((waiting for waiting in self._waiting if waiting.key == key), None)
        if published is None:
            published = _Published(started, self._scope, key, self.number, [])
            self._waiting.append(published)
        return published

    def _all_published(self, store: PatientStore, published: _Published, seconds: float) -> bool:
        """Whether every rank has published as many orders as this one, after waiting at most `seconds`."""
        number = self._scopes[published.scope].published[published.titles]
        end, pause = time.monotonic() + seconds, 0.001
        while store.add(f"{published.scope}/number {number}", 0) < len(self._ranks):
            if time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return True

    def _check(self, store: PatientStore, layer: DeviceLayer, latest: _Published | None) -> str:
        """Check which orders all ranks have published; returns the difference of one that is due, or ""."""
        number, event = self.completed
        for published in self._waiting.copy():
            if store.add(published.key, 0) >= len(self._ranks):
                self._scopes[published.scope].agreed.add(published.titles)
                self._waiting.remove(published)
                continue
            if not published.witness and number > published.number:
                published.witness.append(event)
            if published is latest or (published.witness and layer.has_completed(published.witness[0])):
                self._waiting.remove(published)
                if not self._has_failed(store):  # else a rank may publish this order in its next pass
                    return self._difference(store, published)
        return ""

    def _difference(self, store: PatientStore, published: _Published) -> str:
        own_rank, titles = self._ranks[self._rank], published.titles
        number = self._scopes[published.scope].published[titles]
        for place, rank in enumerate(self._ranks[:_NAMED]):
            key = f"{published.scope}/rank {place}/{number}"
            if place == self._rank or not store.check([key]):
                continue
            text = zlib.decompress(bytes.fromhex(store.get(key).decode()))
            others = text.decode().split("\n")
            for at, (ours, other) in enumerate(zip_longest(titles, others, fillvalue=_NOTHING)):
                if ours != other:
                    return (
                        "the ranks do not agree on the order of collectives: as number "
                        f"{at + 1} of a pass rank {own_rank} starts {ours}, rank {rank} {other}; {_END}"
                    )
        return (
            f"the ranks do not agree on the order of collectives: rank {own_rank} starts {', '.join(titles[:4])}"
            f"{' ...' if titles[4:] else ''}, and not all of ranks {self._ranks} do so; {_END}"
        )


_compared: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()
watched: "weakref.WeakKeyDictionary[dist.ProcessGroup, CollectiveOrder]" = weakref.WeakKeyDictionary()


def watch_order(group: dist.ProcessGroup) -> CollectiveOrder | None:
    """Record the order of the collectives that this process starts on a group. Does not communicate.

    Returns:
        the same object at each call; None for one rank, torch's fake group, or a process group without a store.
    """
    known = watched.get(group)
    if known is None and group.size() > 1 and not compat.is_fake(group):
        store = group.get_group_store()
        if store is not None:
            known = watched[group] = CollectiveOrder(dist.get_process_group_ranks(group), group.rank(), store)
    return known


def count_compared(group: dist.ProcessGroup) -> int:
    """Count a buffer that all ranks of a group have built; returns the count."""
    _compared[group] = count = _compared.get(group, 0) + 1
    return count
