"""How the ranks of a group on one machine connect to each other, or agree that they cannot, and why."""

import contextlib
import ctypes
import secrets
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from .process_memory import machine, obstacles, read_memory, system_call

PATIENCE = 5.0  # seconds for the others to connect, after all said that they can
_RANK = struct.Struct("<Q")

_ABSENT = "did not connect"

T = TypeVar("T")


@dataclass(frozen=True)
class Peer:
    """A connection to another rank's process.

    Attributes:
        socket: AF_UNIX, SOCK_SEQPACKET: it keeps messages apart, and breaks when either process ends.
        process: the other's number, as this process sees it.
    """

    socket: socket.socket
    process: int


@dataclass(frozen=True)
class _Card:
    """What a rank tells the others of itself.

    Attributes:
        name: of its listening socket, in the abstract namespace: it ends with its process and needs no folder.
        address, secret: where in its memory the secret lies, by which a reader knows that it reads the right one.
        machine: tells its machine from others, where that is known.
        trouble: why this rank cannot take part, or "".
    """

    name: str
    address: int
    secret: bytes
    machine: str
    trouble: str


def connect(group: dist.ProcessGroup) -> tuple[dict[int, Peer], str]:
    """Connect all ranks of a group that can read each other's memory.

    Collective. Communicates two object all-gathers of some hundred bytes a rank.

    Returns:
        the other ranks of the group, and ""; or none and the reason, the same on all ranks.
    """
    rank = group.rank()
    secret = ctypes.create_string_buffer(secrets.token_bytes(16), 16)
    listener, name, trouble = _listen()
    with contextlib.closing(listener):
        cards = _gathered(group, _Card(name, ctypes.addressof(secret), secret.raw, machine(), trouble))
        trouble = _first(f"rank {other}: {one.trouble}" for other, one in enumerate(cards) if one.trouble)
        trouble = trouble or _elsewhere(cards)
        if trouble:
            return {}, trouble
        peers: dict[int, Peer] = {}
        try:
            _meet(listener, rank, cards, peers)
            _check_memory(peers, cards)
        except OSError as error:
            trouble = str(error)
        found = [f"rank {other}: {one}" for other, one in enumerate(_gathered(group, trouble)) if one]
        # That somebody did not come is the effect; why, another rank may know.
        trouble = _first(sorted(found, key=lambda text: _ABSENT in text))
        if trouble:
            for peer in peers.values():
                peer.socket.close()
            return {}, trouble
        return peers, ""


def _gathered(group: dist.ProcessGroup, item: T) -> list[T]:
    items = [item] * group.size()
    dist.all_gather_object(items, item, group=group)
    return items


def _elsewhere(cards: Sequence[_Card]) -> str:
    """Which rank is on another machine, as far as that is known without waiting for connections; or ""."""
    for other, card in enumerate(cards):
        if card.machine and cards[0].machine and card.machine != cards[0].machine:
            return f"rank {other} is on another machine than rank 0"
    return ""


def _first(texts: Iterable[str]) -> str:
    return next(iter(texts), "")


def _listen() -> tuple[socket.socket, str, str]:
    """A socket that waits for the others, its name, and why it cannot, or ""."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    name = f"\0dbuffer-{secrets.token_hex(16)}"
    if system_call() is None:
        return listener, name, "this platform has no process_vm_readv"
    try:
        listener.bind(name)
        listener.listen()
    except OSError as error:
        return listener, name, f"no local socket: {error}"
    return listener, name, ""


def _meet(listener: socket.socket, rank: int, cards: Sequence[_Card], peers: dict[int, Peer]) -> None:
    """Fill `peers` with a connection to each other rank: call those below, answer those above.

    Raises:
        OSError: one could not be reached, in words.
    """
    for other in range(rank):
        calling = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            calling.connect(cards[other].name)
            calling.send(_RANK.pack(rank))
        except OSError as error:
            calling.close()
            raise OSError(
                f"cannot reach rank {other} by a local socket ({error.strerror}): "
                "another machine or another network namespace"
            ) from error
        peers[other] = Peer(calling, _process_of(calling, other))
    listener.settimeout(PATIENCE)
    while len(peers) < len(cards) - 1:
        try:
            answering, _ = listener.accept()
        except TimeoutError:
            missing = sorted(set(range(len(cards))) - peers.keys() - {rank})
            raise OSError(f"ranks {missing} {_ABSENT} within {PATIENCE:g} s") from None
        answering.settimeout(PATIENCE)
        message = answering.recv(_RANK.size)
        if len(message) != _RANK.size:
            raise OSError("a process connected that is not a rank of the group")
        (other,) = _RANK.unpack(message)
        if not rank < other < len(cards) or other in peers:
            raise OSError(f"a process connected as rank {other}")
        peers[other] = Peer(answering, _process_of(answering, other))
    for peer in peers.values():
        peer.socket.setblocking(False)


def _process_of(connection: socket.socket, rank: int) -> int:
    """The number of the process behind a connection, as this process sees it."""
    size = struct.calcsize("iII")
    process, _, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if process <= 0:
        raise OSError(f"rank {rank} is in another PID namespace")
    return int(process)


def _check_memory(peers: Mapping[int, Peer], cards: Sequence[_Card]) -> None:
    """Read each peer's secret. Raises OSError where that is refused, or brings something else."""
    found = ctypes.create_string_buffer(16)
    for other, peer in peers.items():
        try:
            read_memory(peer.process, cards[other].address, ctypes.addressof(found), 16)
        except OSError as error:
            why = f"{error.strerror}; {obstacles(peer.process)}"
            raise OSError(f"may not read rank {other}'s memory ({why})") from error
        if found.raw != cards[other].secret:
            raise OSError(f"process {peer.process} is not rank {other}")
