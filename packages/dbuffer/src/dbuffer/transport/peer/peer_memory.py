"""Exchanges in which a rank reads the memory of other ranks on the same machine, straight into place.

    rank 0                                                  rank 1
    GIVE: "exchange 7: it is at byte .." --- socket --->    copies it out of its mapping of rank 0's memory,
                                                            then looks whether rank 0 is still there
                                        <--- socket ----    TAKEN: "exchange 7"

A byte is copied once; a reduction adds up straight out of all peers' memory, a piece at a time.
A thread of this process answers, so an exchange completes when all ranks have started it, also while they compute.
Only that thread reads memory and adds up, and only it decides how an exchange ends; so when `wait` returns or raises,
nothing is being written any more. What a rank gives is in its shared memory, or is copied there first.

A rank that gives up (a timeout, another exchange than its peers', a failed read) first shuts all its connections,
and only then lets `wait` raise, after which its memory may change. A reader looks at the connection after reading:
if it is still there, it has read the exchanged values.
"""

import atexit
import contextlib
import ctypes
import hashlib
import os
import select
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..protocol import Op, Pairs
from .arena import PeerFile, arena, offset_of
from .handshake import Peer

PIECE_BYTES = 1 << 18  # of each rank's memory, added while the sum is in the cache
_DIGEST_BYTES = 16
_PATIENCE = 60.0  # seconds of one look at an exchange
GRACE = 30.0  # seconds that `wait` allows the answering thread beyond an exchange's own time
_GIVE = struct.Struct(f"<BQ{_DIGEST_BYTES}sH")  # kind, number of the exchange, digest, bytes of the label
_PLACE = struct.Struct("<QQ")  # where in the giving rank's memory, bytes
_TAKEN = struct.Struct("<BQ")  # kind, number of the exchange
_KIND_GIVE, _KIND_TAKEN = 1, 2
_MESSAGE_BYTES, _LABEL_BYTES = 1 << 16, 400
_ALIGNMENT = 64  # bytes, of copies made for peers
_PLACES = (_MESSAGE_BYTES - _GIVE.size - _LABEL_BYTES) // _PLACE.size  # tensors that one message can name

Places = list[tuple[int, int]]  # (where, bytes)


class Sum:
    """This rank's slices and the peers', added always in the same order of peers.

    Args:
        pairs: (receive, own), contiguous and 1-D; `receive` may be `own`.
        peers: all other ranks; in this order they are added.
        op: "avg" divides by the number of ranks at the end.
    """

    def __init__(self, pairs: Pairs, peers: Sequence[int], op: Op) -> None:
        self._pairs, self.peers, self._op = pairs, tuple(peers), op

    @property
    def own(self) -> list[torch.Tensor]:
        """This rank's slices; peers' slices have the same shapes."""
        return [own for _, own in self._pairs]

    @torch.no_grad()
    def add(self, slices: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Write the sums of this rank's and all peers' slices."""
        for index, (receive, own) in enumerate(self._pairs):
            first, *others = (slices[peer][index] for peer in self.peers)
            step = PIECE_BYTES // own.itemsize
            for begin in range(0, own.numel(), step):
                part = slice(begin, begin + step)
                total = torch.add(own[part], first[part], out=receive[part])
                for other in others:
                    total.add_(other[part])
                if self._op == "avg":
                    total.div_(1 + len(self.peers))


@dataclass(frozen=True, slots=True)
class _Target:
    """The place of a tensor. Its storage may have other memory by the time that something is written."""

    address: int
    nbytes: int
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> "_Target":
        return _Target(tensor.data_ptr(), tensor.nbytes, tensor.dtype)


class PeerExchange:
    """One exchange with all peers, in both directions. Waits like a torch work.

    Attributes:
        number: counts the exchanges of this rank; 0 until the thread has begun it.
        label: name of the exchange.
        untaken: peers whose tensors this rank has not read yet.
        unread: peers that have not read this rank's yet.
    """

    def __init__(
        self,
        answering: "_Answering",
        label: str,
        gives: Mapping[int, Sequence[torch.Tensor]],
        takes: Mapping[int, Sequence[torch.Tensor]],
        timeout: float,
        total: Sum | None = None,
    ) -> None:
        self._answering = answering
        # what the tensors of peers are added to; None where they are copied into their places
        self.total = total
        shared = _in_shared_memory(gives)
        self._in_use: object = (shared, takes)  # alive as long as a peer, or the thread, may look at them
        self.number, self.label = 0, label
        # given_digests, taken_digests: of what peers must have in common with this rank
        self.given_digests = {peer: _digest(label, tensors) for peer, tensors in gives.items()}
        self.taken_digests = {peer: _digest(label, tensors) for peer, tensors in takes.items()}
        # where in this rank's memory the tensors for each peer are
        self.gives = {peer: _places(tensors) for peer, tensors in shared.items()}
        # where what each peer gives is to be, in this process
        self.takes = {peer: [_Target.of(tensor) for tensor in tensors] for peer, tensors in takes.items()}
        self.untaken, self.unread = set(takes), set(gives)
        self._timeout = timeout
        # on the monotonic clock; the group's timeout after the start
        self.deadline = time.monotonic() + timeout
        self.quiet = False  # whether nothing reads or writes the tensors any more
        self.under_way = True  # whether `wait` has not raised
        self._error: str | None = None
        # Not an Event: a signal that comes while one takes its inner lock leaves that locked, and the thread stuck.
        self._ended = threading.Lock()
        self._ended.acquire()

    def end(self, error: str | None = None) -> None:
        """Completed, or failed for this reason: the answering thread is done with it, or has ended."""
        self._error = error
        self._in_use = self.total = None
        self.quiet = True
        with contextlib.suppress(RuntimeError):  # ended already
            self._ended.release()

    def is_completed(self) -> bool:
        """See `Work`."""
        return self.quiet

    def wait(self) -> None:
        """See `Work`. The group's timeout counts from the start of the exchange."""
        while not self.wait_for(_PATIENCE):
            pass

    def wait_for(self, seconds: float) -> bool:
        """See `Work`."""
        patience = max(self.deadline + GRACE - time.monotonic(), 0.0)
        if not self.quiet and self._ended.acquire(timeout=min(patience, seconds)):
            self._ended.release()
        if not self.quiet and patience > seconds:
            return False
        if not self.quiet:
            self._answering.hang_up()  # before this rank's memory may change
            self.under_way = False
            raise RuntimeError(
                f"the thread that exchanges memory has not answered for {GRACE:g} s after the timeout; the memory of "
                "this exchange is set aside for good"
            )
        if self._error is not None:
            error = RuntimeError(self._error)
            self.under_way = False  # only now: until this is raised, another error is a signal handler's
            raise error
        return True

    def why_late(self, done: set[int]) -> str:
        """The reason at its deadline, when these peers have given their tensors: others may wait for the same ones."""
        awaited = self.untaken | self.unread
        missing = sorted(awaited - done or awaited)
        return f"rank(s) {missing} of the group did not take part in {self.label} within {self._timeout:g} s"


def _digest(label: str, tensors: Sequence[torch.Tensor]) -> bytes:
    """Hash of the label, and of each tensor's dtype and size, which must be equal on both ranks."""
    text = f"{label} {[(str(tensor.dtype), tensor.numel()) for tensor in tensors]}"
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


def _places(tensors: Sequence[torch.Tensor]) -> Places:
    places = []
    for tensor in tensors:
        offset = _offset(tensor) if tensor.nbytes else 0
        assert offset is not None, "peers cannot read this tensor"
        places.append((offset, tensor.nbytes))
    return places


def _offset(tensor: torch.Tensor) -> int | None:
    return offset_of(tensor.data_ptr(), tensor.nbytes)


def _in_shared_memory(gives: Mapping[int, Sequence[torch.Tensor]]) -> Mapping[int, Sequence[torch.Tensor]]:
    """The tensors themselves where peers can read them, else copies, all in one block."""
    private = {
        (tensor.data_ptr(), tensor.nbytes): tensor
        for tensors in gives.values()
        for tensor in tensors
        if tensor.nbytes and _offset(tensor) is None
    }
    if not private:
        return gives
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in private.values()]
    copies = {}
    for (key, tensor), block in zip(private.items(), arena().allocate(sum(sizes)).split(sizes), strict=True):
        copies[key] = block[: tensor.nbytes].view(tensor.dtype).copy_(tensor.detach())
    return {
        peer: [copies.get((tensor.data_ptr(), tensor.nbytes), tensor) for tensor in tensors]
        for peer, tensors in gives.items()
    }


class PeerMemory:
    """This rank's connections to the other ranks of a group.

    Args:
        peers: all other ranks, by their rank in the group.
        timeout: seconds after which an exchange that has not completed fails.
    """

    name = "peer_memory"

    def __init__(self, peers: Mapping[int, Peer], timeout: float) -> None:
        self._timeout = timeout
        self._answering = _Answering(peers)
        _open.add(self._answering)
        self._answering.thread.start()
        weakref.finalize(self, _shut, self._answering.bell)  # the thread ends with the group

    def exchange(
        self,
        label: str,
        gives: Mapping[int, Sequence[torch.Tensor]],
        takes: Mapping[int, Sequence[torch.Tensor]],
        total: Sum | None = None,
    ) -> PeerExchange:
        """Start giving each peer some tensors and taking as many from it. All ranks make the same calls in order.

        Args:
            label: names the exchange; compared between the ranks.
            gives, takes: contiguous tensors on the CPU, by peer.
            total: adds the tensors of peers up, in its order of additions, instead of copying them into `takes`.
        """
        exchange = PeerExchange(self._answering, label, gives, takes, self._timeout, total)
        try:
            self._answering.start(exchange)
        except BaseException:
            self._answering.hang_up()  # a signal handler's: the exchange may have begun, and nothing waits for it
            raise
        return exchange


class _GiveUpError(Exception):
    """Why this rank closes its connections."""


class _Answering:
    """The thread: sends peers the places of this rank's slices, reads theirs, and ends exchanges."""

    def __init__(self, peers: Mapping[int, Peer]) -> None:
        self._peers = peers
        self._number = 0
        self._started: deque[PeerExchange] = deque()
        self.bell, self._heard = socket.socketpair()  # wakes the thread; shut, it ends it
        self.bell.setblocking(False)
        self.thread = threading.Thread(target=self.run, name="dbuffer peers", daemon=True)
        self._under_way: dict[int, PeerExchange] = {}
        self._offers: dict[tuple[int, int], tuple[bytes, str, Places]] = {}  # by (exchange, peer)
        self._outbox: dict[int, deque[bytes]] = {peer: deque() for peer in peers}
        self._gone: set[int] = set()
        self._selector = selectors.DefaultSelector()

    # -- called by other threads ------------------------------------------------------------------------------------

    def start(self, exchange: PeerExchange) -> None:
        """Let the thread begin an exchange."""
        self._started.append(exchange)
        try:
            self.bell.send(b"!")
        except BlockingIOError:
            pass  # it rings already
        except OSError:  # the thread has ended
            with contextlib.suppress(ValueError):  # it has seen this one, and says why it has failed
                self._started.remove(exchange)
                exchange.end(
                    f"the connections of this rank to the others of the group are closed; {exchange.label} needs them"
                )

    def hang_up(self) -> None:
        """Signal to peers that this rank has given up, in any state of the thread."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # it may be shut already
                peer.socket.shutdown(socket.SHUT_RDWR)

    def drop(self, reason: str) -> None:
        """Close this process's ends of the connections and fail the exchanges under way."""
        for connection in (*(peer.socket for peer in self._peers.values()), self._heard):
            connection.close()
        self._selector.close()
        while self._started:  # after the bell: an exchange that starts later sees that it is closed
            self._started.popleft().end(reason)
        for exchange in self._under_way.values():
            exchange.end(reason)

    # -- the thread -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until the group is gone or an exchange fails. Then no connection is left, and exchanges under way fail."""
        reason = "the process group was destroyed"
        try:
            self._selector.register(self._heard, selectors.EVENT_READ, None)
            for rank, peer in self._peers.items():
                self._selector.register(peer.socket, selectors.EVENT_READ, rank)
            while self._turn():
                continue
        except _GiveUpError as error:
            reason = str(error)
        except BaseException as error:
            reason = f"the thread that exchanges memory failed: {type(error).__name__}: {error}"
            raise
        finally:  # also when this thread fails: no caller may wait for it
            self.hang_up()  # only then may this rank's own waits raise
            self.drop(reason)

    def _turn(self) -> bool:
        """Do what can be done now; False when the group is gone."""
        deadline = min((exchange.deadline for exchange in self._under_way.values()), default=None)
        patience = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        for key, events in self._selector.select(patience):
            if key.data is None:
                if not self._heard.recv(4096):
                    return False
                self._begin()
                continue
            if events & selectors.EVENT_WRITE:
                self._flush(key.data)
            if events & selectors.EVENT_READ:
                self._hear(key.data)
        for exchange in self._under_way.values():
            if time.monotonic() >= exchange.deadline:
                raise _GiveUpError(exchange.why_late(self._peers_that_gave(exchange)))
        return True

    # -- what this rank starts --------------------------------------------------------------------------------------

    def _begin(self) -> None:
        while self._started:
            exchange = self._started.popleft()
            self._number += 1
            exchange.number = self._number
            self._under_way[exchange.number] = exchange
            for peer in exchange.gives:
                self._send(peer, _give_messages(exchange, peer))
            for peer in exchange.takes:
                self._take(exchange, peer)
            self._end_if_done(exchange)
            self._check_gone()

    def _send(self, peer: int, messages: list[bytes]) -> None:
        self._outbox[peer].extend(messages)
        self._flush(peer)

    def _flush(self, peer: int) -> None:
        """Send what the socket takes now, and the rest when it takes more."""
        outbox, connection = self._outbox[peer], self._peers[peer].socket
        if peer in self._gone:
            outbox.clear()
            return
        while outbox:
            try:
                connection.send(outbox[0])
            except BlockingIOError:
                break
            except OSError:  # it is gone: earlier messages are read first, then the end
                outbox.clear()
                break
            outbox.popleft()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if outbox else 0)
        if self._selector.get_key(connection).events != events:
            self._selector.modify(connection, events, peer)

    # -- what peers say ---------------------------------------------------------------------------------------------

    def _hear(self, peer: int) -> None:
        """One message."""
        connection = self._peers[peer].socket
        try:
            message = connection.recv(_MESSAGE_BYTES)
        except (BlockingIOError, ConnectionResetError):
            return  # after a reset, earlier messages can still be read, then the end
        self._begin()  # a peer may answer before the bell is heard
        if not message:
            self._selector.unregister(connection)
            self._gone.add(peer)
            self._check_gone()
        elif message[0] == _KIND_TAKEN and len(message) == _TAKEN.size:
            if exchange := self._under_way.get(_TAKEN.unpack(message)[1]):
                exchange.unread.discard(peer)
                self._end_if_done(exchange)
        elif message[0] == _KIND_GIVE and len(message) >= _GIVE.size:
            self._hear_give(peer, message)
        else:
            raise _GiveUpError(f"rank {peer} of the group sent {len(message)} bytes that mean nothing")

    def _hear_give(self, peer: int, message: bytes) -> None:
        _, number, digest, label_bytes = _GIVE.unpack_from(message)
        begin = _GIVE.size + label_bytes
        label = message[_GIVE.size : begin].decode(errors="replace")
        _, _, places = self._offers.setdefault((number, peer), (digest, label, []))
        places.extend(_PLACE.iter_unpack(message[begin:]))
        if exchange := self._under_way.get(number):
            self._take(exchange, peer)
            self._end_if_done(exchange)

    def _check_gone(self) -> None:
        """Give up where an exchange needs a peer that is gone. One that has taken and given all is not needed."""
        for exchange in self._under_way.values():
            if needed := self._gone & (exchange.untaken | exchange.unread):
                raise _gone(min(needed), exchange)

    def _peers_that_gave(self, exchange: PeerExchange) -> set[int]:
        read = exchange.takes.keys() - exchange.untaken
        return read | {peer for number, peer in self._offers if number == exchange.number}

    def _take(self, exchange: PeerExchange, peer: int) -> None:
        """Take what a peer gives, where this rank has started too; for a sum, once all peers have given."""
        awaited = [peer] if exchange.total is None else list(exchange.takes)
        ready = [other for other in awaited if self._has_given_all(exchange, other)]  # raises if one differs
        if ready != awaited:
            return
        slices = {other: self._slices(exchange, other) for other in awaited}
        if exchange.total is not None:
            exchange.total.add(slices)
        else:
            for source, target in zip(slices[peer], exchange.takes[peer], strict=True):
                copy_memory(target.address, source)
        for other in awaited:
            if _hung_up(self._peers[other].socket):  # it may have changed the memory while that was read
                raise _gone(other, exchange)
            exchange.untaken.discard(other)
            self._send(other, [_TAKEN.pack(_KIND_TAKEN, exchange.number)])

    def _has_given_all(self, exchange: PeerExchange, peer: int) -> bool:
        """Whether a peer has sent the places of all slices for this rank. Raises _GiveUpError if it differs."""
        if (exchange.number, peer) not in self._offers:
            return False
        digest, label, places = self._offers[exchange.number, peer]
        wanted = exchange.takes[peer]
        if digest != exchange.taken_digests[peer]:
            sizes, expected = [size for _, size in places], [target.nbytes for target in wanted]
            raise _GiveUpError(
                f"rank {peer} of the group takes part in {label}, giving {_listed(sizes)} bytes, where this rank takes "
                f"part in {exchange.label}, expecting {_listed(expected)}; all ranks must make the same calls in the "
                "same order"
            )
        return len(places) == len(wanted)

    def _slices(self, exchange: PeerExchange, peer: int) -> list[torch.Tensor]:
        """A peer's tensors, by their place in its memory."""
        _, _, places = self._offers.pop((exchange.number, peer))
        memory = self._peers[peer].memory
        return [
            _view(memory, place, target.dtype)
            for place, target in zip(places, exchange.takes[peer], strict=True)
        ]

    def _end_if_done(self, exchange: PeerExchange) -> None:
        if not (exchange.untaken or exchange.unread):
            self._under_way.pop(exchange.number, None)
            exchange.end()


def _gone(peer: int, exchange: PeerExchange) -> _GiveUpError:
    return _GiveUpError(f"rank {peer} of the group has ended or given up, during {exchange.label}")


def _give_messages(exchange: PeerExchange, peer: int) -> list[bytes]:
    """The message with the places of this rank's tensors."""
    label = exchange.label.encode()[:_LABEL_BYTES]
    head = _GIVE.pack(_KIND_GIVE, exchange.number, exchange.given_digests[peer], len(label)) + label
    places = exchange.gives[peer]
    return [
        head + b"".join(_PLACE.pack(*place) for place in places[begin : begin + _PLACES])
        for begin in range(0, max(len(places), 1), _PLACES)
    ]


def _view(memory: PeerFile, place: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor over a peer's memory, to be read only."""
    begin, nbytes = place
    if not nbytes:
        return torch.empty(0, dtype=dtype)
    if begin + nbytes > memory.size:
        raise _GiveUpError(f"{nbytes} bytes at {begin} are not in a peer's memory of {memory.size} bytes")
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(memory.address + begin), dtype=dtype)


def copy_memory(into: int, source: torch.Tensor) -> None:
    """Copy the bytes of a tensor to an address, in this thread alone."""
    ctypes.memmove(into, source.data_ptr(), source.nbytes)


def _shut(connection: socket.socket) -> None:
    """Let the other end see the end, also where a forked child holds a copy of this one."""
    with contextlib.suppress(OSError):  # it may be shut already
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _hung_up(connection: socket.socket) -> bool:
    """Whether the other end is closed or shut, even if there is data left to read."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


def _listed(sizes: list[int]) -> str:
    return str(sizes) if len(sizes) <= 4 else f"{sizes[:4]} and {len(sizes) - 4} more"


# Connections of this process. A forked child (a data loader's worker) would keep them open beyond this process's end.
_open: "weakref.WeakSet[_Answering]" = weakref.WeakSet()


def _forget_in_child() -> None:
    for answering in list(_open):
        answering.bell.close()  # and not shut: it is the parent's too
        answering.drop("its connections belong to the process that forked this one")


os.register_at_fork(after_in_child=_forget_in_child)


def _end_threads() -> None:
    """A thread that drops tensors while the interpreter is finalized ends the process by abort()."""
    ending = list(_open)
    for answering in ending:
        _shut(answering.bell)
    until = time.monotonic() + GRACE
    for answering in ending:
        if answering.thread.ident is not None:  # else an interrupt came before it was started
            answering.thread.join(max(until - time.monotonic(), 0.0))


atexit.register(_end_threads)
