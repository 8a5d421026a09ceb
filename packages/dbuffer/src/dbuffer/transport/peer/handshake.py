"""How the ranks of a group on one machine connect to each other, or agree that they cannot, and why."""

import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from ragged_shard.dist import gather_from_ranks

from .arena import PeerFile, arena, peer_file

PATIENCE = 5.0  # seconds for the others to connect, after all have agreed
_HELLO = struct.Struct("<Q16s")  # rank of the caller, secret of the rank it calls

_ABSENT = "did not connect"


@dataclass(frozen=True)
class Peer:
    """A connection to another rank's process."""

    # AF_UNIX, SOCK_SEQPACKET: it keeps messages apart, and breaks when either process ends
    socket: socket.socket
    memory: PeerFile  # the other's memory, where this process reads it


@dataclass(frozen=True)
class _Card:
    """A rank's address and abilities, as sent to the others."""

    # of its listening socket, in the abstract namespace: it ends with its process and needs no folder
    name: str
    secret: bytes  # by which it knows that a rank of the group calls
    machine: str  # identifies its machine, where that is known
    trouble: str  # why this rank cannot take part, or ""


def connect(group: dist.ProcessGroup) -> tuple[dict[int, Peer], str]:
    """Connect all ranks of a group on one machine, and map each other's memory.

    Collective. Communicates two object all-gathers of some hundred bytes a rank.

    Returns:
        the other ranks of the group, and ""; or none and the reason, the same on all ranks.
    """
    name = f"\0dbuffer-{secrets.token_hex(16)}"
    peers: dict[int, Peer] = {}
    with contextlib.ExitStack() as connections, contextlib.ExitStack() as listening:
        listener, trouble = None, ""
        try:
            listener = listening.enter_context(_listener(name))
        except OSError as error:
            trouble = str(error)
        cards = gather_from_ranks(_Card(name, secrets.token_bytes(16), machine(), trouble), group)
        troubles = [f"rank {other}: {card.trouble}" for other, card in enumerate(cards) if card.trouble]
        trouble = troubles[0] if troubles else _elsewhere(cards)
        if listener is None or trouble:
            return {}, trouble
        try:
            sockets = _meet(listener, group.rank(), cards, connections)
            peers = _exchange_memory(sockets)
        except OSError as error:
            trouble = str(error)
        troubles = [
            f"rank {other}: {text}" for other, text in enumerate(gather_from_ranks(trouble, group)) if text
        ]
        if troubles:  # a missing rank is the effect; another rank may report the cause
            return {}, min(troubles, key=lambda text: _ABSENT in text)
        connections.pop_all()
    return peers, ""


def machine() -> str:
    """The same for all processes of a running kernel; "" where that is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _elsewhere(cards: Sequence[_Card]) -> str:
    """Message that names a rank on another machine, as far as it is known without a connection; or ""."""
    for other, card in enumerate(cards):
        if card.machine and cards[0].machine and card.machine != cards[0].machine:
            return f"rank {other} is on another machine than rank 0"
    return ""


def _listener(name: str) -> socket.socket:
    """A socket that waits for the others. Raises OSError where this rank cannot take part."""
    try:
        arena()
    except OSError as error:
        raise OSError(f"no memory that others can map ({error})") from error
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(name)
        listener.listen()
    except OSError as error:
        listener.close()
        raise OSError(f"no local socket ({error})") from error
    listener.settimeout(PATIENCE)
    return listener


def _meet(
    listener: socket.socket, rank: int, cards: Sequence[_Card], connections: contextlib.ExitStack
) -> dict[int, socket.socket]:
    """A connection to each other rank: call those below, answer those above.

    Raises:
        OSError: one could not be reached, in words.
    """
    sockets: dict[int, socket.socket] = {}
    for other in range(rank):
        calling = connections.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        calling.settimeout(PATIENCE)
        try:
            calling.connect(cards[other].name)
            calling.send(_HELLO.pack(rank, cards[other].secret))
        except OSError as error:
            raise OSError(
                f"cannot reach rank {other} by a local socket ({error.strerror}): "
                "another machine or another network namespace"
            ) from error
        sockets[other] = calling
    while len(sockets) < len(cards) - 1:
        try:
            answering = connections.enter_context(listener.accept()[0])
        except TimeoutError:
            missing = sorted(set(range(len(cards))) - sockets.keys() - {rank})
            raise OSError(f"ranks {missing} {_ABSENT} within {PATIENCE:g} s") from None
        answering.settimeout(PATIENCE)
        message = answering.recv(_HELLO.size)
        other, secret = _HELLO.unpack(message) if len(message) == _HELLO.size else (-1, b"")
        if secret != cards[rank].secret or not rank < other < len(cards) or other in sockets:
            raise OSError("a process connected that is not a rank of the group")
        sockets[other] = answering
    return sockets


def _exchange_memory(sockets: Mapping[int, socket.socket]) -> dict[int, Peer]:
    """Pass this process's memory to all others, and map theirs. Raises OSError: that is not possible, in words."""
    peers: dict[int, Peer] = {}
    for connection in sockets.values():
        socket.send_fds(connection, [b"!"], [arena().fd])
    for other, connection in sockets.items():
        fds: list[int] = []
        try:
            fds = socket.recv_fds(connection, 1, 1)[1]
            if not fds:
                raise OSError("it passed none")
            peers[other] = Peer(connection, peer_file(fds[0]))
        except OSError as error:
            raise OSError(f"cannot map rank {other}'s memory ({error})") from error
        finally:
            for fd in fds:
                os.close(fd)
        connection.setblocking(False)
    return peers
