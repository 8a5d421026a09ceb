"""Says which collective is stuck and which ranks are missing, before it times out.

rank 0 (late)                 the store                     ranks 1, 2 (each looks every few seconds)
asks: "gather 17 of A" ------> question/0 ----------------> answer/0/1: "waiting in it"
reads the answers <----------- answer/0/1, answer/0/2 <---- answer/0/2: "started 16; at data.py:88 in read"
reports                                                    (rank 3 is frozen, or very slow: no answer)
"""

import contextlib
import json
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType

from torch.distributed.distributed_c10d import Store

from dbuffer import times_started, waiting
from ragged_shard import list_ranks

_PATIENCE = 5.0  # seconds that leaving waits for a store that does not answer
_log = logging.getLogger("fsdp_runtime.watchdog")


@dataclass(frozen=True)
class _Place:
    """Where a rank is: `started` counts the question's collective there."""

    rank: int
    host: str
    process: int
    waits_for: str
    number: int
    started: int
    line: str
    beat: str

    def __str__(self) -> str:
        doing = (
            f"waits for {self.waits_for}, its {_nth(self.number)}" if self.waits_for else f"is {self.line}"
        )
        return f"rank {self.rank} ({self.host}, process {self.process}) {doing}"


@dataclass(frozen=True)
class _Question:
    """What a late rank asks about: a collective that it waits for, or (empty) its lack of progress."""

    rank: int
    collective: str
    number: int
    ranks: tuple[int, ...]
    seconds: float
    doing: str = ""


class Watchdog:
    """Reports a collective that is late: which one, of which unit, which ranks have not begun it, and where those are.

    A rank is late when it has waited `after` seconds for a collective of its units, or when as much time has passed
    since the last `beat`. It asks, every rank that can answers, and the one that asked reports. A rank without an
    answer is frozen, gone, cut off, or too busy for its threads to run. The question is repeated every `after` seconds
    while nothing moves. Nothing is ended: that is for the timeout of the process group, which should be longer.

        with Watchdog(store, rank, world_size, after=60) as watchdog:
            for step, batch in enumerate(batches):
                watchdog.beat(f"step {step}")
                ...

    Waits for collectives that the host does not wait for (on accelerators) are seen through `beat` alone.

    Args:
        store: one that all ranks share, with a prefix of its own (`torch.distributed.PrefixStore`). Used by the
            watchdog's threads only; a store with one connection needs a clone.
        rank, world_size: of the job.
        after: seconds without progress that count as late.
        every: seconds between two looks; None: a tenth of `after`, at most 5.
        report: takes the text, one line; None: a warning of the logger `fsdp_runtime.watchdog`. Called by a thread.

    Communicates through the store alone: the host's name at the start, a question of some 20 bytes every `every`
    seconds and rank, and, when a rank is late, one answer of some 300 bytes of each. No collective.

    Raises:
        ValueError: `after` or `every` is not positive.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        after: float,
        every: float | None = None,
        report: Callable[[str], object] | None = None,
    ) -> None:
        if after <= 0 or (every is not None and every <= 0):
            raise ValueError(f"after is {after} and every {every} seconds; expected more than 0")
        self.after, self.every = after, min(5.0, after / 10) if every is None else every
        self._patience = 2 * self.every + 1  # seconds for answers: two looks and a second
        self._store, self._rank, self._world_size = store, rank, world_size
        self._report = _log.warning if report is None else report
        self._watched = threading.get_ident()
        self._beat: tuple[str, float] | None = None
        self._asked_at = 0.0
        self._round = 0
        self._ending = threading.Event()
        self._questions: queue.SimpleQueue[_Question] = queue.SimpleQueue()
        self._talking_since = float("inf")
        self._lost = ""  # why the store can no longer be used
        self._thread = threading.Thread(target=self._run, name="fsdp-watchdog", daemon=True)
        # On its own: a store that is cut off may keep it for ever, whatever the store's timeout.
        self._talker = threading.Thread(target=self._talk, name="fsdp-watchdog-store", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._watched = threading.get_ident()
        self._thread.start()
        self._talker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join()
        self._talker.join(_PATIENCE)

    def beat(self, doing: str) -> None:
        """Say that there is progress; `doing` is what begins now, for reports. Costs an assignment."""
        self._beat = (doing, time.monotonic())

    def _run(self) -> None:
        while not self._ending.wait(self.every):
            question = self._late()
            if question is None:
                continue
            self._asked_at = time.monotonic()
            silent_for = self._asked_at - self._talking_since
            if not self._lost and silent_for < 3 * self.every + 1:  # a question takes so long itself
                self._questions.put(question)
            else:
                self._report_alone(
                    question, self._lost or f"the store has not answered for {silent_for:.0f} s"
                )

    def _talk(self) -> None:
        question: _Question | None = None
        try:
            self._store.set(f"host/{self._rank}", socket.gethostname())
            while not self._ending.wait(self.every):
                question = self._next_question()
                self._talking_since = time.monotonic()
                self._look(question)
                self._talking_since = float("inf")
        except Exception as error:  # the store's, of any kind: its process may be gone
            self._lost = str(error).partition("\n")[0] or type(error).__name__
            while question := question or self._next_question():
                self._report_alone(question, self._lost)
                question = None

    def _next_question(self) -> _Question | None:
        with contextlib.suppress(queue.Empty):
            return self._questions.get_nowait()
        return None

    def _report_alone(self, question: _Question, why: str) -> None:
        if not self._ending.is_set():
            self._report(f"{self._subject(question)}; the other ranks cannot be asked: {why}")

    def _late(self) -> _Question | None:
        """What to ask, if this rank is late and has not asked of late."""
        now = time.monotonic()
        if now - self._asked_at < self.after:
            return None
        for wait in waiting():
            if wait.seconds >= self.after:
                return _Question(self._rank, wait.collective, wait.number, wait.ranks, wait.seconds)
        if self._beat is not None and now - self._beat[1] >= self.after:
            return _Question(
                self._rank, "", 0, tuple(range(self._world_size)), now - self._beat[1], self._beat[0]
            )
        return None

    def _look(self, question: _Question | None) -> None:
        """Ask, if there is something to ask; answer, if another rank has asked."""
        key = f"question/{self._round}"
        if question is None and not self._store.check([key]):
            return
        if question is not None:
            mine = json.dumps(asdict(question))
            won = self._store.compare_set(key, "", mine)
        else:
            won = self._store.get(key)
        asked = _Question(**{**json.loads(won), "ranks": tuple(json.loads(won)["ranks"])})
        prefix = f"answer/{self._round}"
        self._round += 1
        self._store.set(f"{prefix}/{self._rank}", json.dumps(asdict(self._place(asked.collective))))
        if asked.rank == self._rank:
            answers = self._answers(prefix, asked.ranks)
            silent = [(rank, self._host_of(rank)) for rank in asked.ranks if rank not in answers]
            self._report(_described(asked, answers, silent, self._subject(asked), self._patience))

    def _host_of(self, rank: int) -> str:
        """What a rank said at its start; "" if it has not."""
        key = f"host/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _answers(self, prefix: str, ranks: Iterable[int]) -> dict[int, _Place]:
        """The answers that come in time."""
        missing, found = set(ranks), dict[int, _Place]()
        until = time.monotonic() + self._patience
        while missing and time.monotonic() < until and not self._ending.is_set():
            for rank in sorted(missing):
                if not self._ending.is_set() and self._store.check([f"{prefix}/{rank}"]):
                    found[rank] = _Place(**json.loads(self._store.get(f"{prefix}/{rank}")))
                    missing.discard(rank)
            self._ending.wait(min(0.1, self.every))
        return found

    def _place(self, collective: str) -> _Place:
        waits = waiting()
        frame = sys._current_frames().get(self._watched)
        line = "no longer running Python"
        if frame is not None:
            code = frame.f_code
            line = f"at {os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_qualname}"
        return _Place(
            self._rank,
            socket.gethostname(),
            os.getpid(),
            waits[0].collective if waits else "",
            waits[0].number if waits else 0,
            times_started(collective),
            line,
            self._beat[0] if self._beat else "",
        )

    def _subject(self, question: _Question) -> str:
        who = f"rank {self._rank} ({socket.gethostname()})"
        if question.collective:
            number = _nth(question.number)
            return f"{who} has waited {question.seconds:.0f} s for {question.collective}, its {number}"
        return f"{who} has made no progress for {question.seconds:.0f} s in {question.doing}"


def _described(
    question: _Question,
    answers: dict[int, _Place],
    silent: Sequence[tuple[int, str]],
    subject: str,
    seconds: float,
) -> str:
    places = [answers[rank] for rank in sorted(answers)]
    texts = [subject]
    if question.collective:
        inside = [p for p in places if (p.waits_for, p.number) == (question.collective, question.number)]
        behind = [p for p in places if p.started < question.number]
        others = [p for p in places if p not in inside and p not in behind]
        texts.append(f"{list_ranks([p.rank for p in inside])} wait{'s' if len(inside) == 1 else ''} in it")
        texts += [f"missing: {p}, and has started {p.started}" for p in behind]
        texts += [f"past it: {p}" for p in others]
    else:
        texts += [f"{p}{f', in {p.beat}' if p.beat else ''}" for p in places]
    if silent:
        hosts = {host: [rank for rank, theirs in silent if theirs == host] for _, host in silent}
        shown = ", ".join(
            list_ranks(ranks, 16) + (f" ({host})" if host else "") for host, ranks in hosts.items()
        )
        texts.append(
            f"no answer in {seconds:.1f} s from {shown}: stopped, ended, cut off from the others, or too busy to answer"
        )
    return "; ".join(texts)


def _nth(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
