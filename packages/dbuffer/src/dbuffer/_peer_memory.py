"""Reading the memory of other ranks on the same machine, straight into place, where the kernel allows it.

    rank 0                                        rank 1
    give: "it is at 0x7f.." --- socket --->       takes it with process_vm_readv, into its place
                            <--- socket --- "taken"

A byte is copied once, not in and out of the kernel. Linux lets processes of one user do this unless it is told not to
(Yama's ptrace_scope, seccomp, other PID namespaces); `connect` tries it and says so. Answers are given by a thread of
this process, so that an exchange is over as soon as all ranks have started it, whatever they compute.
"""

import ctypes
import functools
import os
import selectors
import socket
import struct
import sys
import threading
import uuid
import weakref
from collections.abc import Mapping
from queue import SimpleQueue

import torch
import torch.distributed as dist

from . import _torch_compat as compat

_GIVEN = struct.Struct("<QQQ")  # number of the exchange, address, bytes
_TAKEN = struct.Struct("<Q")  # number of the exchange
_RANK = struct.Struct("<Q")
_MOST = 1 << 30  # bytes in one call; Linux cuts them off at 2 GiB
_PATIENCE = 5.0  # seconds for the others to connect, who have all agreed to


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


@functools.cache
def _reader() -> "ctypes._NamedFuncPointer | None":
    """The system call; None where there is none."""
    if not sys.platform.startswith("linux"):
        return None
    read = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if read is not None:
        vector = ctypes.POINTER(_Vector)
        count = ctypes.c_ulong
        read.restype = ctypes.c_ssize_t
        read.argtypes = [ctypes.c_int, vector, count, vector, count, count]
    return read


def read_memory(process: int, address: int, into: torch.Tensor) -> None:
    """Fill a contiguous CPU tensor with another process's bytes.

    Raises:
        OSError: the kernel refuses, or there is no such process or memory.
    """
    read = _reader()
    if read is None:
        raise OSError("this platform has no process_vm_readv")
    done = 0
    while done < into.nbytes:
        size = min(into.nbytes - done, _MOST)
        here, there = _Vector(into.data_ptr() + done, size), _Vector(address + done, size)
        got = read(process, here, 1, there, 1, 0)
        if got <= 0:
            error = ctypes.get_errno()
            raise OSError(error, f"reading {size} bytes of process {process}: {os.strerror(error)}")
        done += got


class PeerExchange:
    """What is given to and taken from each peer; over when all is taken. Waits like a torch work."""

    def __init__(
        self, gives: Mapping[int, torch.Tensor], takes: Mapping[int, torch.Tensor], patience: float
    ) -> None:
        self._gives = gives  # kept: the peers read them
        self._patience = patience
        self._over = threading.Event()
        self.takes = takes
        self.untaken = set(takes)  # by this rank
        self.unread = set(gives)  # by peers
        self.error: str | None = None

    def progress(self) -> None:
        """Be over when nothing is left to do, or nothing can be done any more."""
        if self.error is not None or not (self.untaken or self.unread):
            self._gives = self.takes = {}
            self._over.set()

    def is_completed(self) -> bool:
        """Whether `wait` would not block."""
        return self._over.is_set()

    def wait(self) -> None:
        """Block until it is over.

        Raises:
            RuntimeError: a peer has died, gives something else, or does nothing for as long as the group allows.
        """
        if not self._over.wait(self._patience):
            missing = sorted(self.untaken | self.unread)
            # From here on nothing is read into memory that may have gone to others.
            self.error = f"rank(s) {missing} of the group did not take part within {self._patience:g} s"
        if self.error is not None:
            raise RuntimeError(self.error)


class Peers:
    """This rank's connections to the other ranks of a group. All ranks make the same exchanges in the same order."""

    def __init__(
        self, sockets: Mapping[int, socket.socket], processes: Mapping[int, int], patience: float
    ) -> None:
        self._sockets = sockets
        self._patience = patience
        self._number = 0
        self._started: SimpleQueue[tuple[int, PeerExchange]] = SimpleQueue()
        self._bell, bell = socket.socketpair()
        answering = _Answering(sockets, processes, self._started, bell)
        threading.Thread(target=answering.run, name="dbuffer peers", daemon=True).start()
        weakref.finalize(self, self._bell.close)  # the thread ends with the group

    def exchange(self, gives: Mapping[int, torch.Tensor], takes: Mapping[int, torch.Tensor]) -> PeerExchange:
        """Start letting each peer read one tensor, and reading one of each; contiguous, on the CPU.

        Raises:
            RuntimeError: the thread that answers has failed before; its traceback is in the output.
        """
        self._number += 1
        exchange = PeerExchange(gives, takes, self._patience)
        self._started.put((self._number, exchange))
        try:
            self._bell.send(b"!")
        except OSError as error:
            raise RuntimeError(
                "the connections of this rank to the others of the group are closed"
            ) from error
        for peer, tensor in gives.items():
            try:
                self._sockets[peer].send(_GIVEN.pack(self._number, tensor.data_ptr(), tensor.nbytes))
            except OSError:  # it has died: the thread sees that too, and says so
                continue
        return exchange


class _Answering:
    """The thread: reads what peers give as soon as this rank expects it, and notes what they have taken."""

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        processes: Mapping[int, int],
        started: "SimpleQueue[tuple[int, PeerExchange]]",
        bell: socket.socket,
    ) -> None:
        self._sockets = sockets
        self._processes = processes
        self._started = started
        self._bell = bell
        self._expected: dict[int, PeerExchange] = {}
        self._given: dict[tuple[int, int], tuple[int, int]] = {}  # (exchange, peer): (address, bytes)
        self._gone: set[int] = set()

    def run(self) -> None:
        """Until the group is gone."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._bell, selectors.EVENT_READ, None)
                for peer, connection in self._sockets.items():
                    selector.register(connection, selectors.EVENT_READ, peer)
                while self._answer(selector):
                    continue
        finally:  # also when this thread fails: nobody is to wait for it
            self._close()

    def _answer(self, selector: selectors.BaseSelector) -> bool:
        """What has come in by now; False when the group is gone."""
        for key, _ in selector.select():
            if key.data is not None:
                if not self._hear(key.data):
                    selector.unregister(key.fileobj)
            elif self._bell.recv(4096):
                self._begin()
            else:
                return False
        return True

    def _close(self) -> None:
        for connection in (self._bell, *self._sockets.values()):
            connection.close()
        while not self._started.empty():  # after the bell: what starts from now on fails at once
            number, exchange = self._started.get()
            self._expected[number] = exchange
        for exchange in self._expected.values():
            exchange.error = exchange.error or "the connections of this rank were closed"
            exchange.progress()

    def _begin(self) -> None:
        while not self._started.empty():
            number, exchange = self._started.get()
            self._expected[number] = exchange
            for peer in list(exchange.untaken):
                self._take(number, peer)
            for peer in self._gone & (exchange.untaken | exchange.unread):
                self._fail(number, f"rank {peer} of the group has ended")
            self._settle(number)

    def _hear(self, peer: int) -> bool:
        """One message; whether more may come."""
        try:
            message = self._sockets[peer].recv(_GIVEN.size)
        except OSError:
            message = b""
        self._begin()  # a peer may answer before the bell is heard
        if len(message) == _GIVEN.size:
            number, address, size = _GIVEN.unpack(message)
            self._given[number, peer] = (address, size)
            self._take(number, peer)
            self._settle(number)
        elif message:
            (number,) = _TAKEN.unpack(message)
            if number in self._expected:
                self._expected[number].unread.discard(peer)
                self._settle(number)
        else:
            self._gone.add(peer)
            for number, exchange in list(self._expected.items()):
                if peer in exchange.untaken | exchange.unread:
                    self._fail(number, f"rank {peer} of the group has ended")
                    self._settle(number)
        return bool(message)

    def _take(self, number: int, peer: int) -> None:
        """Read what a peer gives, if it has given it and this rank has started too and not given up."""
        exchange = self._expected.get(number)
        if exchange is None or exchange.error is not None or (number, peer) not in self._given:
            return
        address, size = self._given.pop((number, peer))
        into = exchange.takes[peer]
        try:
            if size != into.nbytes:
                raise OSError(f"gives {size} bytes; expected {into.nbytes}")
            read_memory(self._processes[peer], address, into)
            exchange.untaken.discard(peer)
            self._sockets[peer].send(_TAKEN.pack(number))
        except OSError as error:
            self._fail(number, f"rank {peer} of the group: {error}")

    def _fail(self, number: int, why: str) -> None:
        exchange = self._expected[number]
        exchange.error = exchange.error or why

    def _settle(self, number: int) -> None:
        exchange = self._expected.get(number)
        if exchange is not None:
            exchange.progress()
            if exchange.is_completed():
                del self._expected[number]


def connect(group: dist.ProcessGroup) -> Peers | None:
    """Connect all ranks of a group on one machine; None, on all of them, where one cannot read another's memory.

    Collective. Communicates one all-gather of 48 bytes a rank and one all-reduce of 8.
    """
    size, rank = group.size(), group.rank()
    address, secret = uuid.uuid4(), torch.randint(1 << 62, (1,))
    listener = _listen(address)
    able = int(listener is not None and _reader() is not None)
    name = struct.unpack("<qq", address.bytes)
    mine = torch.tensor([able, os.getpid(), secret.data_ptr(), int(secret), *name])
    others = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(others, mine, group=group)
    told = {other: tuple(found.tolist()) for other, found in enumerate(others) if other != rank}
    sockets = _meet(listener, rank, told) if listener and able and all(t[0] for t in told.values()) else None
    agreed = torch.tensor(int(sockets is not None))
    dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)
    if listener is not None:
        listener.close()
    if sockets is None or not agreed:
        for connection in (sockets or {}).values():
            connection.close()
        return None
    return Peers(sockets, {other: t[1] for other, t in told.items()}, compat.timeout_seconds(group))


def _listen(address: uuid.UUID) -> socket.socket | None:
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(_path(address))
        listener.listen()
    except (AttributeError, OSError):
        return None
    return listener


def _path(address: uuid.UUID) -> str:
    return f"\0dbuffer-{address.hex}"  # abstract: ends with its process, needs no folder


def _meet(
    listener: socket.socket, rank: int, told: Mapping[int, tuple[int, ...]]
) -> dict[int, socket.socket] | None:
    """A connection to each other rank, each of whose memory could be read; None where that failed."""
    sockets: dict[int, socket.socket] = {}
    try:
        for _, process, address, secret, *_ in told.values():
            found = torch.zeros(1, dtype=torch.int64)
            read_memory(process, address, found)
            if int(found) != secret:
                raise OSError(f"process {process} is another one")
        for other, (*_, high, low) in told.items():
            if other < rank:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                connection.connect(_path(uuid.UUID(bytes=struct.pack("<qq", high, low))))
                connection.send(_RANK.pack(rank))
                sockets[other] = connection
        listener.settimeout(_PATIENCE)
        while len(sockets) < len(told):
            connection, _ = listener.accept()
            connection.settimeout(_PATIENCE)
            (other,) = _RANK.unpack(connection.recv(_RANK.size))
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            process, _, _ = struct.unpack("iII", credentials)
            if process != told[other][1]:
                raise OSError(f"process {process} connected as rank {other}")
            connection.settimeout(None)
            sockets[other] = connection
    except (OSError, KeyError, struct.error):
        for connection in sockets.values():
            connection.close()
        return None
    return sockets
