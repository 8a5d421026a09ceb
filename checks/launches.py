"""Runs of `fsdp-train` that cost a fork and not an import: the command and its ranks are forked from this warm process.

The command line, the agent and all that a rank does are as in a run from a shell; only starting an interpreter and
importing torch are left out. `exact=True` leaves nothing out.
"""

import ctypes
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

import fsdp_runtime.train.checkpoint
import fsdp_runtime.train.launch
import fsdp_runtime.train.trainer
from fsdp_runtime.train import __main__ as cli

_SUBREAPER = 36  # of prctl
NOTE = "attacked"  # the file that a rank makes before it attacks itself


@dataclass(frozen=True)
class Attack:
    """What is done to one process of a launch.

    Attributes:
        victim: a rank, or -1 for the launcher.
        freeze: seconds from SIGSTOP to SIGCONT; 0 for SIGKILL.
        at: seconds after the start; or where in the rank's program: at the `count`-th call of, or return from, one of
            the functions in `calls`.
    """

    victim: int
    freeze: float
    at: float | None
    calls: frozenset[str] = frozenset()
    count: int = 0


@dataclass
class Ended:
    """How a launch ended: the command's status (negative: a signal; None: it hung) and what it said."""

    status: int | None
    said: str
    attacked: bool
    left: list[int] = field(default_factory=list)  # processes that had to be killed


class _Rank:
    """A forked rank, with what elastic uses of `subprocess.Popen`."""

    def __init__(self, attack: Attack | None, args: tuple[str, ...], env: Mapping[str, str]) -> None:
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        try:
            os.setsid()
            os.environ.clear()
            os.environ.update(env)
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            logging.disable(logging.NOTSET)
            if attack and attack.victim == int(env["RANK"]) and attack.calls:
                _attack_at(attack)
            fsdp_runtime.train.launch.end_process(cli.main([]))
        finally:
            os._exit(70)

    def poll(self) -> int | None:
        if self._status is None:
            pid, code = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(code)
        return self._status

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.01)
        return status


def _attack_at(attack: Attack) -> None:
    """Count calls and returns of the functions that the attack names, in all threads; attack at its number."""
    seen = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal seen
        name = getattr(argument, "__name__", "") if event.startswith("c_") else frame.f_code.co_name
        if name in attack.calls:
            seen += 1
            if seen == attack.count:
                os.close(os.open(NOTE, os.O_CREAT | os.O_WRONLY))
                os.kill(os.getpid(), signal.SIGSTOP if attack.freeze else signal.SIGKILL)

    threading.setprofile(profile)
    sys.setprofile(profile)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent dies, so that none can get out of sight."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def launch(argv, folder, attack, patience, *, exact=False) -> Ended:
    """Run `fsdp-train` in `folder`, attack it, and wait until every process of it has ended."""
    (folder / NOTE).unlink(missing_ok=True)
    log = folder / "said.txt"
    launcher = os.fork()
    if launcher == 0:
        _be_launcher(argv, folder, attack, log, exact)
    begun, sent, stopped_at = time.monotonic(), False, None
    status: int | None = None
    while True:
        try:
            pid, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == launcher:
            status = os.waitstatus_to_exitcode(code)
        now = time.monotonic() - begun
        if attack and attack.at is not None and not sent and now >= attack.at:
            victim = victim_of(launcher, attack)
            sent = victim is not None and _send(victim, signal.SIGSTOP if attack.freeze else signal.SIGKILL)
        if attack and attack.freeze and (sent or (folder / NOTE).exists()):
            stopped_at = stopped_at or now
            if now >= stopped_at + attack.freeze:
                for process in descendants():
                    _send(process, signal.SIGCONT)
        if now > patience:
            left = descendants()
            for process in left:
                _send(process, signal.SIGKILL)
            _reap()
            return Ended(None, log.read_text(errors="replace"), True, left)
        if pid == 0:
            time.sleep(0.01)
    return Ended(status, log.read_text(errors="replace"), sent or (folder / NOTE).exists())


def _be_launcher(argv: list[str], folder: Path, attack: Attack | None, log: Path, exact: bool) -> None:
    try:
        os.setsid()
        os.chdir(folder)
        out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        for descriptor in (1, 2):
            os.dup2(out, descriptor)
        sys.stdout = sys.stderr = open(out, "w", buffering=1)  # noqa: SIM115  (pytest has replaced them)
        (folder / "tmp").mkdir(exist_ok=True)
        os.environ["TMPDIR"] = str(folder / "tmp")
        tempfile.tempdir = None
        if exact:
            os.execv(sys.executable, [sys.executable, "-m", "fsdp_runtime.train", *argv])

        def popen(self: object, args: tuple[str, ...], env: Mapping[str, str]) -> _Rank:
            return _Rank(attack, args, env)

        with mock.patch.object(SubprocessHandler, "_popen", popen):
            status = cli.main(argv)
        os._exit(status)
    finally:
        os._exit(71)


def victim_of(launcher: int, attack: Attack) -> int | None:
    """The process to attack; None where it is not there (yet, or any more)."""
    if attack.victim < 0:
        return launcher
    try:
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        return int(children[attack.victim])
    except (OSError, IndexError):
        return None


def descendants() -> list[int]:
    """All processes of the launch: those below this process, which adopts orphans."""
    parents = dict(_parents())
    below = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return sorted(below - {os.getpid()})


def _parents() -> Iterable[tuple[int, int]]:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            yield int(path.name), int(fields[1])


def _send(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _reap(wait: Callable[[], object] = lambda: os.waitpid(-1, 0)) -> None:
    while True:
        try:
            wait()
        except ChildProcessError:
            return
