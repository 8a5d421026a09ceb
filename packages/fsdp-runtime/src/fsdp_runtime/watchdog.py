"""Reports which collective is stuck and which ranks are missing, before it times out.

rank 0 (late)                     the store                     ranks 1, 2 (each looks every few seconds)
asks: "gather 17 of A" ----------> question/0 ----------------> answer/0/1: "waiting in it"
reads the answers and reports <--- answer/0/1, answer/0/2 <---- answer/0/2: "started 16; at data.py:88 in read"
                                                                (rank 3 is frozen, or very slow: no answer)
"""

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import Store

from dbuffer import PatientStore, times_started, waiting
from ragged_shard.dist import list_ranks

from ._torch_compat import flight_recorders


class Watchdog:
    """Reports a collective that is late: which one, of which unit, which ranks have not begun it, and where those are.

    A rank is late when it has waited `after` seconds for a collective of its units, or when as much time has passed
    since the last `beat`. It asks the other ranks through the store, and reports their answers; again every `after`
    seconds while nothing moves. Nothing is ended: the process group's timeout does that. Use it as a context manager.

    On accelerators the host does not wait for collectives: only `beat` is watched, and torch's flight recorder has the
    collectives. With a `folder` each rank that reports or answers writes its own, as JSON. It has the last 2000
    (`TORCH_FR_BUFFER_SIZE`) collectives of torch's backends, not those of peer memory.

    Issues no collective; requests of the store have 20 to 300 bytes.

    Args:
        store: shared by all ranks, with a separate prefix (`torch.distributed.PrefixStore`). Used by the
            watchdog's threads only; a store with one connection needs a clone.
        after: seconds without progress that count as late.
        every: seconds between two looks. Defaults to a tenth of `after`, at most 5.
        report: gets the text, one line, in a thread. Defaults to a warning of the logger `fsdp_runtime.watchdog`.
        folder: gets ``flight-recorder-rank-N.json``, replaced by each later report. Defaults to none.

    Raises:
        ValueError: `after` or `every` is not positive.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, *, after: float, every: float | None = None,
        report: Callable[[str], object] | None = None, folder: str | os.PathLike[str] | None = None,
    ) -> None:  # fmt: skip
        if after <= 0 or (every is not None and every <= 0):
            raise ValueError(f"after is {after} and every {every} seconds; expected more than 0")
        self.after, self.every = after, min(5.0, after / 10) if every is None else every
        self._world_size, self._rank, self._host = world_size, rank, socket.gethostname()
        self._patience = 2 * self.every + 1  # seconds: two looks and one more
        self._store = PatientStore(store, self._patience)
        self._report = report or logging.getLogger("fsdp_runtime.watchdog").warning
        self._trace = Path(folder).absolute() / f"flight-recorder-rank-{rank}.json" if folder else None
        self._beat, self._asked_at, self._round = ("", float("inf")), 0.0, -1
        self._watched, self._ending = threading.get_ident(), threading.Event()
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
        while not self._ending.is_set():
            question = self._late()
            try:
                self._look(question)
            except Exception as error:  # the store's, of any kind: its process may be gone
                if (question := question or self._late()) and not self._ending.is_set():
                    why = str(error).partition("\n")[0] or type(error).__name__
                    self._report(
                        f"{question['text']}; the other ranks cannot be asked: {why}{self._write_trace()}"
                    )
            self._ending.wait(self.every)

    def _late(self) -> dict[str, Any] | None:
        """The question to ask, if this rank is late and has not asked in the last `after` seconds."""
        now, (doing, since) = time.monotonic(), self._beat
        wait = next((wait for wait in waiting() if wait.seconds >= self.after), None)
        if (wait is None and now - since < self.after) or now - self._asked_at < self.after:
            return None
        text, call = f"has made no progress for {now - since:.0f} s in {doing}", ("", 0)
        ranks = tuple(range(self._world_size))
        if wait is not None:
            call, ranks = (wait.collective, wait.number), wait.ranks
            text = f"has waited {wait.seconds:.0f} s for {wait.collective} number {wait.number}"
        self._asked_at, text = now, f"rank {self._rank} ({self._host}) {text}"
        return {"rank": self._rank, "text": text, "call": call, "ranks": ranks}

    def _look(self, question: dict[str, Any] | None) -> None:
        """Ask, if there is something to ask; answer, if another rank has asked."""
        if self._round < 0:
            self._store.set(f"host/{self._rank}", self._host)
            self._round = 0
        key, prefix = f"question/{self._round}", f"answer/{self._round}/"
        if question is None and not self._store.check([key]):
            return
        known = self._store.compare_set(key, "", json.dumps(question)) if question else self._store.get(key)
        asked = json.loads(known)
        self._round += 1
        written = self._write_trace()  # first: the report names the files of all ranks that have answered
        self._store.set(f"{prefix}{self._rank}", json.dumps(self._place(*asked["call"])))
        if asked["rank"] == self._rank:
            self._report(self._answers(asked, prefix) + written)

    def _write_trace(self) -> str:
        """Write this rank's flight recorder; what a report says of it."""
        if self._trace is None:
            return ""
        if not (trace := flight_recorders()):
            return "; torch's flight recorder is empty: it is switched off, or has seen no collective"
        try:
            partial = self._trace.with_suffix(".tmp")
            partial.write_text(json.dumps(trace))
            partial.replace(self._trace)
        except OSError as error:
            return f"; the flight recorder cannot be written: {error}"
        return f"; flight recorder: {self._trace}; its folder has those of the ranks that answered"

    def _place(self, collective: str, number: int) -> tuple[str, str]:
        """Where this rank is: relative to the collective, and in words."""
        frame, waits = sys._current_frames().get(self._watched), waiting()
        doing, started = "is no longer running Python", times_started(collective)
        if waits:
            doing = f"waits for {waits[0].collective} number {waits[0].number}"
        elif frame is not None:
            file, name = os.path.basename(frame.f_code.co_filename), frame.f_code.co_qualname
            doing = f"is at {file}:{frame.f_lineno} in {name}"
        text = f"rank {self._rank} ({self._host}, process {os.getpid()}) {doing}"
        if not collective:
            return "", text + (f", in {self._beat[0]}" if self._beat[0] else "")
        if waits and (waits[0].collective, waits[0].number) == (collective, number):
            return "inside", text
        return "", f"missing: {text}, and has started {started}" if started < number else f"past it: {text}"

    def _answers(self, asked: dict[str, Any], prefix: str) -> str:
        """The report, once all ranks have answered or their time is over."""
        places, until = dict[int, tuple[str, str]](), time.monotonic() + self._patience
        while (silent := set(asked["ranks"]) - set(places)) and time.monotonic() < until:
            for rank in sorted(silent):
                if not self._ending.is_set() and self._store.check([f"{prefix}{rank}"]):
                    places[rank] = json.loads(self._store.get(f"{prefix}{rank}"))
            until = 0.0 if self._ending.wait(min(0.1, self.every)) else until
        texts, inside = [asked["text"]], [rank for rank in sorted(places) if places[rank][0] == "inside"]
        if asked["call"][0]:
            texts.append(f"{list_ranks(inside)} wait{'s' if len(inside) == 1 else ''} in it")
        texts += [places[rank][1] for rank in sorted(places) if rank not in inside]
        hosts = dict[str, list[int]]()
        for rank in sorted(silent):
            known = self._store.check([f"host/{rank}"])
            host = f" ({self._store.get(f'host/{rank}').decode()})" if known else ""
            hosts.setdefault(host, []).append(rank)
        who = ", ".join(list_ranks(ranks, 16) + host for host, ranks in hosts.items())
        reasons = "stopped, ended, cut off from the others, or too busy to answer"
        texts += [f"no answer in {self._patience:.1f} s from {who}: {reasons}"] if who else []
        return "; ".join(texts)
