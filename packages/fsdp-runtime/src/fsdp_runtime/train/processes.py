"""The processes of one launch: start them, wait for all of them, and tell which one failed first.

When a rank dies, the others lose their connection to it and fail too, often before the operating system reports the
first death: its sockets close before it can be waited for. So a rank that only lost contact with the others ends
with status LOST, and is never named while there is another cause.
"""

import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

LOST = 3  # exit status of a rank that failed because another one was gone


@dataclass(frozen=True)
class Ended:
    """How a process ended: `status` is negative after a signal, `at` the `time.monotonic()` when that was seen."""

    rank: int
    status: int
    at: float


@dataclass(frozen=True)
class Failure:
    """What went wrong on a rank, in one line; `at` is a `time.monotonic()`, which processes of a machine share."""

    at: float
    rank: int
    text: str
    kind: str  # "user": the same on all ranks; "crash"; "lost": another rank is gone


@dataclass(frozen=True)
class Outcome:
    """All ends, in order, and the ranks that had to be told to end."""

    ended: tuple[Ended, ...]
    told: frozenset[int]


class Processes:
    """Running ranks.

    Args:
        commands: one for each rank.
        environments: one for each rank, whole.

    Until all are started SIGINT is ignored, so that they inherit this: Ctrl-C reaches them from the terminal too, and
    must not end one that is still importing.
    """

    def __init__(self, commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]]) -> None:
        self._ends: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for rank, (command, environment) in enumerate(zip(commands, environments, strict=True)):
                self._running[rank] = subprocess.Popen(command, env=environment)
        except BaseException:
            self.kill()
            raise
        finally:
            signal.signal(signal.SIGINT, before)
        for rank, process in self._running.items():
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        status = process.wait()
        self._ends.put(Ended(rank, status, time.monotonic()))

    def wait(self, *, grace: float = 5.0, patience: float = 30.0) -> Outcome:
        """Wait until all have ended.

        Args:
            grace: seconds that a rank may take to end after another has lost contact with it.
            patience: seconds from SIGTERM, which all are sent after a failure, to SIGKILL.
        """
        ended: list[Ended] = []
        told: frozenset[int] = frozenset()
        terminate_at = kill_at = float("inf")
        while len(ended) < len(self._running):
            now = time.monotonic()
            alive = set(self._running) - {end.rank for end in ended}
            if now >= kill_at:
                self._signal(alive, signal.SIGKILL)
                kill_at = float("inf")
            elif now >= terminate_at:
                told, terminate_at, kill_at = frozenset(alive), float("inf"), now + patience
                self._signal(alive, signal.SIGTERM)
            try:
                ended.append(self._ends.get(timeout=min(0.5, max(0.0, min(terminate_at, kill_at) - now))))
            except queue.Empty:
                continue
            if ended[-1].status and not told:
                wait = grace if ended[-1].status == LOST else 0.0
                terminate_at = min(terminate_at, time.monotonic() + wait)
        return Outcome(tuple(ended), told)

    def _signal(self, ranks: set[int], number: signal.Signals) -> None:
        for rank in ranks:
            self._running[rank].send_signal(number)

    def kill(self) -> None:
        """End what still runs with SIGKILL, and wait for it."""
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait()


def cause(outcome: Outcome, said: Sequence[Failure]) -> Failure | None:
    """Which rank failed first and how; None if none did.

    Of ranks that ended by themselves, the first that did more than lose contact. If all lost contact, those that did
    not answer are named.

    Args:
        outcome: how the processes ended.
        said: what ranks could say themselves.
    """
    if not any(end.status for end in outcome.ended):
        return None
    spoke = {failure.rank for failure in said}
    found = [failure for failure in said if failure.kind != "lost"]
    silent = (end for end in outcome.ended if end.rank not in spoke | outcome.told)
    found += [_silent(end) for end in silent if end.status != LOST]
    if found:
        return min(found, key=lambda failure: failure.at)
    lost = min(said, key=lambda failure: failure.at, default=None) or _silent(outcome.ended[0])
    absent = ", ".join(str(rank) for rank in sorted(outcome.told))
    return replace(lost, text=f"no answer from rank {absent}; {lost.text}") if absent else lost


def _silent(end: Ended) -> Failure:
    """The failure of a rank that could not say anything."""
    how = f"ended with status {end.status}" + ("" if end.status else " before the others were done")
    if end.status < 0:
        names = {int(number): number.name for number in signal.Signals}
        name = names.get(-end.status, f"signal {-end.status}")
        how = f"was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return Failure(end.at, end.rank, f"rank {end.rank} {how}", "crash")
