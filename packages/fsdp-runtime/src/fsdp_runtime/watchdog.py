"""Says which collective is stuck and which ranks are missing, before it times out.

rank 0 (late)                 the store                     ranks 1, 2 (each looks every few seconds)
asks: "gather 17 of A" ------> question/0 ----------------> answer/0/1: "waiting in it"
reads the answers <----------- answer/0/1, answer/0/2 <---- answer/0/2: "started 16; at data.py:88 in read"
reports                                                    (rank 3 is frozen, or very slow: no answer)
"""

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.distributed_c10d import Store

from dbuffer import times_started, waiting
from ragged_shard import list_ranks

_PATIENCE = 5.0  # seconds that leaving waits for a store that does not answer


class Watchdog:
    """Reports a collective that is late: which one, of which unit, which ranks have not begun it, and where those are.

    A rank is late when it has waited `after` seconds for a collective of its units, or when as much time has passed
    since the last `beat`. It asks through the store, the others answer, and the one that asked reports; again every
    `after` seconds while nothing moves. Nothing is ended: that is for the timeout of the process group.

        with Watchdog(store, rank, world_size, after=60) as watchdog:
            for step, batch in enumerate(batches):
                watchdog.beat(f"step {step}")
                ...

    On accelerators the host does not wait for collectives: only `beat` is watched, and torch's flight recorder
    (`TORCH_NCCL_TRACE_BUFFER_SIZE`) has the collectives.

    Args:
        store: one that all ranks share, with a separate prefix (`torch.distributed.PrefixStore`). Used by the
            watchdog's threads only; a store with one connection needs a clone.
        rank, world_size: of the job.
        after: seconds without progress that count as late.
        every: seconds between two looks. Defaults to a tenth of `after`, at most 5.
        report: gets the text, one line, in a thread. Defaults to a warning of the logger `fsdp_runtime.watchdog`.

    Communicates through the store alone: the host's name at the start, a request of some 20 bytes every `every`
    seconds and rank, and, when a rank is late, one answer of some 300 bytes of each. No collective.

    Raises:
        ValueError: `after` or `every` is not positive.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, *, after: float, every: float | None = None,
        report: Callable[[str], object] | None = None,
    ) -> None:  # fmt: skip
        if after <= 0 or (every is not None and every <= 0):
            raise ValueError(f"after is {after} and every {every} seconds; expected more than 0")
        self.after, self.every = after, min(5.0, after / 10) if every is None else every
        self._store, self._rank, self._world_size = store, rank, world_size
        self._report = report or logging.getLogger("fsdp_runtime.watchdog").warning
        self._watched, self._beat = threading.get_ident(), ("", float("inf"))
        self._asked_at, self._round, self._lost = 0.0, -1, ""  # lost: why the store can no longer be used
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fsdp-watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._watched = threading.get_ident()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.set()
        self._thread.join()

    def beat(self, doing: str) -> None:
        """Record progress; `doing` is what begins now, for reports. Costs an assignment."""
        self._beat = (doing, time.monotonic())

    def _run(self) -> None:
        look, began = threading.Thread(), 0.0
        while not self._ending.is_set():
            question = self._late()
            if look.is_alive() or self._lost:
                silent = time.monotonic() - began
                if question is not None and (self._lost or silent > 3 * self.every + 1):
                    self._report_alone(
                        question, self._lost or f"the store has not answered for {silent:.0f} s"
                    )
            else:  # a thread for each look: a store that is cut off may block it for ever
                look, began = (
                    threading.Thread(target=self._look, args=(question,), daemon=True),
                    time.monotonic(),
                )
                look.start()
            self._ending.wait(self.every)
        if look.is_alive():
            look.join(_PATIENCE)

    def _late(self) -> dict[str, Any] | None:
        """The question to ask, if this rank is late and has not asked of late."""
        now, (doing, since) = time.monotonic(), self._beat
        text, collective, number, ranks = "", "", 0, tuple(range(self._world_size))
        wait = next((wait for wait in waiting() if wait.seconds >= self.after), None)
        if wait is not None:
            collective, number, ranks = wait.collective, wait.number, wait.ranks
            text = f"has waited {wait.seconds:.0f} s for {collective}, its {_nth(number)}"
        elif now - since >= self.after:
            text = f"has made no progress for {now - since:.0f} s in {doing}"
        if not text or now - self._asked_at < self.after:
            return None
        self._asked_at, text = now, f"rank {self._rank} ({socket.gethostname()}) {text}"
        return {"rank": self._rank, "text": text, "collective": collective, "number": number, "ranks": ranks}

    def _report_alone(self, question: dict[str, Any], why: str) -> None:
        if not self._ending.is_set():
            self._report(f"{question['text']}; the other ranks cannot be asked: {why}")

    def _look(self, question: dict[str, Any] | None) -> None:
        """Ask, if there is something to ask; answer, if another rank has asked."""
        try:
            if self._round < 0:
                self._store.set(f"host/{self._rank}", socket.gethostname())
                self._round = 0
            key, prefix = f"question/{self._round}", f"answer/{self._round}/"
            if question is not None:
                asked = json.loads(self._store.compare_set(key, "", json.dumps(question)))
            elif self._store.check([key]):
                asked = json.loads(self._store.get(key))
            else:
                return
            self._round += 1
            self._store.set(f"{prefix}{self._rank}", json.dumps(self._place(asked["collective"])))
            if asked["rank"] == self._rank:
                self._report(self._answers(asked, prefix))
        except Exception as error:  # the store's, of any kind: its process may be gone
            self._lost = str(error).partition("\n")[0] or type(error).__name__
            if question is not None:
                self._report_alone(question, self._lost)

    def _place(self, collective: str) -> dict[str, Any]:
        """Where this rank is, and how many of these collectives it has started."""
        frame, waits = sys._current_frames().get(self._watched), waiting()
        inside = [waits[0].collective, waits[0].number] if waits else ["", 0]
        if waits:
            doing = f"waits for {inside[0]}, its {_nth(waits[0].number)}"
        elif frame is None:
            doing = "is no longer running Python"
        else:
            code = frame.f_code
            doing = f"is at {os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_qualname}"
        text = f"rank {self._rank} ({socket.gethostname()}, process {os.getpid()}) {doing}"
        return {"inside": inside, "started": times_started(collective), "text": text, "beat": self._beat[0]}

    def _answers(self, asked: dict[str, Any], prefix: str) -> str:
        """The report, once all ranks have answered or their time is over."""
        patience = 2 * self.every + 1  # seconds: two looks and a second
        places, until, number = dict[int, Any](), time.monotonic() + patience, asked["number"]
        while (silent := set(asked["ranks"]) - set(places)) and time.monotonic() < until:
            for rank in sorted(silent):
                if self._ending.is_set():
                    until = 0.0
                elif self._store.check([f"{prefix}{rank}"]):
                    places[rank] = json.loads(self._store.get(f"{prefix}{rank}"))
            self._ending.wait(min(0.1, self.every))
        texts, inside = [asked["text"]], list[int]()
        for rank, place in sorted(places.items()):
            if not asked["collective"]:
                texts.append(place["text"] + (f", in {place['beat']}" if place["beat"] else ""))
            elif place["inside"] == [asked["collective"], number]:
                inside.append(rank)
            elif place["started"] < number:
                texts.append(f"missing: {place['text']}, and has started {place['started']}")
            else:
                texts.append(f"past it: {place['text']}")
        if asked["collective"]:
            texts.insert(1, f"{list_ranks(inside)} wait{'s' if len(inside) == 1 else ''} in it")
        hosts: dict[str, list[int]] = {}
        for rank in sorted(silent):
            known = self._store.check([f"host/{rank}"])
            hosts.setdefault(f" ({self._store.get(f'host/{rank}').decode()})" if known else "", []).append(
                rank
            )
        if hosts:
            who = ", ".join(list_ranks(ranks, 16) + host for host, ranks in hosts.items())
            reasons = "stopped, ended, cut off from the others, or too busy to answer"
            texts.append(f"no answer in {patience:.1f} s from {who}: {reasons}")
        return "; ".join(texts)


def _nth(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
