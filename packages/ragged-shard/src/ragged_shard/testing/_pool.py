"""The test process's side: keeps ranks by world size, sends them jobs, collects results, errors and stacks."""

import atexit
import contextlib
import functools
import math
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ragged_shard.device import CPU, num_devices
from ragged_shard.testing import _pickling, _worker

_START_LIMIT = 180.0  # seconds for a loaded machine to import torch
_GRACE = 3.0  # seconds that the other ranks get once one has failed

Failures = dict[int, tuple[BaseException | None, str]]  # error and text by rank


class RankError(AssertionError):
    """One or more ranks raised, died or hung. The message has each one's traceback or stack."""

    def __init__(self, message: str, causes: dict[int, BaseException] | None = None) -> None:
        super().__init__(message)
        self.causes = causes or {}  # the exceptions by rank, of the ranks that raised


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 120.0,
    device: str = CPU.type,
    seed: int | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on every rank of a process group; return the results as a list by rank.

    Ranks are real processes with torch.distributed initialised (gloo on CPU; NCCL with one GPU per rank on CUDA)
    and one thread each; they stay alive for the next call. ``fn`` must be a top-level function (or a partial of
    one), possibly of a test module; arguments and results are pickled. Every rank starts from the same random seed.

    Args:
        world_size: number of ranks.
        fn: the function to call; ``torch.distributed.get_rank()`` is its rank.
        timeout: seconds after which ranks that have not answered count as hanging.
        device: the kind: "cpu", or an accelerator such as "cuda".
        seed: of torch, random and numpy; by default derived from the running test's name.

    Raises:
        RankError: a rank raised (``causes`` has the exceptions by rank), died, or hung: then the message has
            every rank's Python stack.
        ValueError: an unknown device or a world size below 1.
        RuntimeError: fewer devices of that kind than ranks.
    """
    if world_size < 1:
        raise ValueError(f"run_ranks({world_size}): expected at least 1 rank")
    if device != CPU.type and (available := num_devices(device)) < world_size:
        raise RuntimeError(f"{world_size} ranks on {device} need as many devices, found {available}")
    if seed is None:
        seed = zlib.crc32(os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0].encode())
    job = _pickling.dumps({"fn": fn, "args": args, "kwargs": kwargs, "seed": seed})
    key = (world_size, device)
    pool = _pools.get(key)
    if pool is None:
        pool = _pools[key] = _Pool(world_size, device)
    dirty = True
    try:
        results, dirty = pool.run(job, timeout, _pickling.where(fn))
    finally:
        if dirty:
            _discard(key)
    return results


def on_ranks(world_size: int | str, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test so that every rank runs its body, by `run_ranks` with ``options``.

    Arguments of the test are pickled. ``world_size`` may be the name of the one with the number of ranks, or with the
    shape of a mesh of them. What pytest's ``monkeypatch`` changes on a rank is undone there.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def start(*args: Any, **kwargs: Any) -> None:
            if _worker.serving:
                try:
                    test(*args, **kwargs)
                finally:
                    if "monkeypatch" in kwargs:  # this rank's copy of it, which pytest cannot undo
                        kwargs["monkeypatch"].undo()
            else:
                size = kwargs[world_size] if isinstance(world_size, str) else world_size
                ranks = math.prod(size) if isinstance(size, tuple) else size
                run_ranks(ranks, functools.partial(start, **kwargs), **options)

        return start

    return decorate


def preload(*modules: str) -> None:
    """Make ranks share these modules, by full name, instead of importing them one by one.

    For a ``conftest.py``: the process that ranks are forked from imports them when it starts, which the first
    `run_ranks` does. That one raises a `RankError` where an import fails or starts a thread. Later calls of this
    function count from the next `shut_down` on.
    """
    _preloaded.update(dict.fromkeys(modules))


_pools: dict[tuple[int, str], "_Pool"] = {}
_preloaded: dict[str, None] = {}  # an ordered set
_fork_server: "_ForkServer | None" = None


def shut_down() -> None:
    """Stop all ranks. Called at exit; a later `run_ranks` starts new ones."""
    global _fork_server
    for key in list(_pools):
        _discard(key)
    if _fork_server is not None:
        _fork_server.stop()
        _fork_server = None


atexit.register(shut_down)


def _discard(key: tuple[int, str]) -> None:
    pool = _pools.pop(key, None)
    if pool is not None:
        pool.stop()


class _ForkServer:
    """The helper that forks ranks, seen from the test process."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.forks = 0
        self.control, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        usual = [name for name in ("numpy", "pytest", "hypothesis") if name in sys.modules]
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        environment = dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1")  # no threads when it forks
        arguments = [str(child_end.fileno()), path, ",".join([*usual, *_preloaded])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ragged_shard.testing._fork_server", *arguments],
            pass_fds=[child_end.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        child_end.close()
        self.control.settimeout(_START_LIMIT)
        if (message := self.control.recv(4096)) != b"ready":
            why = message.decode(errors="replace") or f"exit status {self.process.wait()}"
            raise RankError(f"the process that forks ranks did not start ({why})")

    def fork(self) -> "_Rank":
        """One more rank."""
        ours, rank_end = socket.socketpair()
        self.forks += 1
        stacks = self.folder / f"stacks-{self.forks}"
        socket.send_fds(self.control, [f"fork {stacks}".encode()], [rank_end.fileno()])
        rank_end.close()
        pid = int(self.control.recv(32))
        return _Rank(pid, Connection(ours.detach()), stacks)

    def wait_for(self, pid: int) -> int:
        """Wait for a rank that is ending and return its exit status; negative for a signal."""
        self.control.send(f"wait {pid}".encode())
        return int(self.control.recv(32))

    def stop(self) -> None:
        """Stop the process and remove its files."""
        self.control.close()
        if self.owner == os.getpid():
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            shutil.rmtree(self.folder, ignore_errors=True)


class _Rank:
    """One rank, seen from the test process."""

    def __init__(self, pid: int, connection: Connection, stacks: Path) -> None:
        self.pid, self.connection, self.stacks = pid, connection, stacks
        self.written = 0  # bytes of the file of stacks when the call began

    def kill(self, fork_server: _ForkServer) -> int:
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return fork_server.wait_for(self.pid)

    def size(self) -> int:
        """Bytes of the file of stacks."""
        return self.stacks.stat().st_size if self.stacks.exists() else 0

    def stack(self) -> str:
        """Every thread's Python stack, as the rank's own fault handler writes it."""
        before = self.size()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        deadline, size = time.monotonic() + 2.0, -1
        while time.monotonic() < deadline:
            time.sleep(0.05)
            now = self.size()
            if now > before and now == size:
                break
            size = now
        return self.stacks.read_text()[before:] or "(no stack: the process did not answer)"


class _Pool:
    """The ranks of one world size on one device."""

    def __init__(self, world_size: int, device: str) -> None:
        global _fork_server
        if _fork_server is None or _fork_server.owner != os.getpid():
            _fork_server = _ForkServer()
        self.fork_server = _fork_server
        self.ranks: list[_Rank] = []
        store = str(self.fork_server.folder / f"store-{self.fork_server.forks}")
        for rank in range(world_size):
            self.ranks.append(self.fork_server.fork())
            setup = {"rank": rank, "world_size": world_size, "store": store, "device": device}
            self.ranks[-1].connection.send_bytes(pickle.dumps(setup))
        self._collect(_START_LIMIT, "starting the process group")

    def run(self, job: bytes, timeout: float, what: str) -> tuple[list[Any], bool]:
        """Results by rank, and whether the job left the ranks unusable for another one."""
        for rank in self.ranks:
            rank.written = rank.size()
            rank.connection.send_bytes(job)
        answers = self._collect(timeout, what)
        return [answer[1] for answer in answers], any(answer[2] for answer in answers)

    def stop(self) -> None:
        """Stop all ranks at once."""
        for rank in self.ranks:
            rank.kill(self.fork_server)

    def _collect(self, timeout: float, what: str) -> list[Any]:
        answers: dict[int, Any] = {}
        failed: Failures = {}
        deadline = time.monotonic() + timeout
        by_connection = {rank.connection: i for i, rank in enumerate(self.ranks)}
        while by_connection:
            ready = wait(list(by_connection), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                i = by_connection.pop(connection)  # type: ignore[call-overload]
                try:
                    answer = pickle.loads(self.ranks[i].connection.recv_bytes())
                except (EOFError, OSError):
                    failed[i] = (None, self._death_notice(i))
                else:
                    if answer[0] == "error":
                        failed[i] = answer[1]
                    else:
                        answers[i] = answer
            if failed:
                deadline = min(deadline, time.monotonic() + _GRACE)
        if failed or by_connection:
            raise self._error(what, timeout, failed, sorted(by_connection.values()))
        return [answers[i] for i in range(len(self.ranks))]

    def _death_notice(self, i: int) -> str:
        status = self.fork_server.wait_for(self.ranks[i].pid)
        reason = f"signal {-status}" if status < 0 else f"exit status {status}"
        left = self.ranks[i].stacks.read_bytes()[self.ranks[i].written :]
        return f"the process died ({reason})\n{left.decode(errors='replace')}"

    def _error(self, what: str, timeout: float, failed: Failures, silent: list[int]) -> RankError:
        count = len(self.ranks)
        ranks, fault = (sorted(failed), "failed") if failed else (silent, f"did not answer in {timeout:g} s")
        parts = [f"{what}: rank {', '.join(map(str, ranks))} of {count} {fault}"]
        for i, (_, text) in sorted(failed.items()):
            parts.append(f"--- rank {i} ---\n{text.rstrip()}")
        parts += [f"--- rank {i} was still running ---\n{self.ranks[i].stack().rstrip()}" for i in silent]
        if not failed and len(silent) < count:
            parts.append(f"the other ranks ({count - len(silent)}) had finished")
        causes = {i: error for i, (error, _) in failed.items() if error is not None}
        return RankError("\n".join(parts), causes)
