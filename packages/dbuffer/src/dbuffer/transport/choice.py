"""Chooses the transport of a process group: once, the same on all ranks, and logged.

"auto"          peer memory for large exchanges of a gloo group of 2 to 16 ranks, if they can read each other's memory;
                else collectives
"collectives"   torch.distributed's collectives for everything
"peer_memory"   peer memory for large exchanges; ValueError where that is not possible
a callable      called once with the process group, returns the caller's `Transport`
"""

import logging
import os
import weakref
from collections.abc import Callable

import torch.distributed as dist

from .. import _torch_compat as compat
from .collectives import Collectives
from .direct import Direct, is_large
from .handshake import connect
from .peer_memory import PIECE_BYTES, PeerMemory
from .process_memory import system_call
from .protocol import Transport

TRANSPORT_VARIABLE = "DBUFFER_TRANSPORT"
MAX_RANKS = 16  # largest group that "auto" connects; larger ones were not measured
TransportChoice = str | Callable[[dist.ProcessGroup], Transport]

_NAMES = ("auto", "collectives", "peer_memory")
_log = logging.getLogger("dbuffer.transport")
_chosen: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[TransportChoice, Transport]]" = (
    weakref.WeakKeyDictionary()
)


def resolved(choice: TransportChoice | None) -> TransportChoice:
    """A choice with the default filled in: the environment variable DBUFFER_TRANSPORT, else "auto".

    Raises:
        ValueError: an unknown name, in the argument or the variable.
    """
    if callable(choice):
        return choice
    name = os.environ.get(TRANSPORT_VARIABLE) or "auto" if choice is None else choice
    if name not in _NAMES:
        source = f"the environment variable {TRANSPORT_VARIABLE}" if choice is None else "transport"
        raise ValueError(
            f"{source} is {name!r}; expected one of {', '.join(_NAMES)}, or a function of a process group"
        )
    return name


def transport_of(group: dist.ProcessGroup, choice: TransportChoice) -> Transport:
    """The transport of a process group, created by the first call and cached.

    Raises:
        ValueError: the named transport does not work for this group.
    """
    known = _chosen.setdefault(group, {})
    if choice not in known:
        known[choice] = choice(group) if callable(choice) else _made(group, choice)
    return known[choice]


def collectives_of(group: dist.ProcessGroup) -> Collectives:
    """torch.distributed's own collectives."""
    transport = transport_of(group, "collectives")
    assert isinstance(transport, Collectives)
    return transport


def _made(group: dist.ProcessGroup, choice: str) -> Transport:
    if choice == "collectives" or group.size() == 1:
        return Collectives(group)
    obstacle = (
        "" if compat.is_gloo(group) else f"the backend is {dist.get_backend_config(group)}, not cpu:gloo"
    )
    if choice == "auto" and not obstacle and group.size() > MAX_RANKS:
        obstacle = f"it has {group.size()} ranks, more than {MAX_RANKS}"
    if not obstacle:
        return Direct(group, choice, _connect_if_possible if choice == "auto" else _connect)
    if choice != "auto":
        raise ValueError(
            f"transport {choice!r} serves gloo groups only, and of this process group {obstacle}; choose 'auto' or "
            "'collectives'"
        )
    _log.info("process group %s: collectives; no peer memory: %s", group.group_name, obstacle)
    return Collectives(group)


def _connect_if_possible(group: dist.ProcessGroup) -> PeerMemory | None:
    peers, trouble = connect(group)
    if trouble:
        _log.info("process group %s: collectives; no peer memory: %s", group.group_name, trouble)
        return None
    _log.info("process group %s: peer_memory for large exchanges", group.group_name)
    return PeerMemory(peers, compat.timeout_seconds(group))


def _connect(group: dist.ProcessGroup) -> PeerMemory:
    peers, trouble = connect(group)
    if trouble:
        raise ValueError(f"transport 'peer_memory' is not possible for this process group: {trouble}")
    _log.info("process group %s: peer_memory for large exchanges, as chosen", group.group_name)
    return PeerMemory(peers, compat.timeout_seconds(group))


def reduction_scratch_bytes(
    gathered_bytes: int, ranks: int, *, backend: str = "gloo", choice: TransportChoice | None = None
) -> int:
    """Bytes that a reduction holds in addition while it runs: one piece with peer memory, 0 with collectives.

    For plans made before there is a process group. "auto" counts as peer memory for up to 16 ranks where the platform
    has it; ranks learn only later whether they may read each other's memory. Memory inside the backend's collectives
    is not known.

    Args:
        gathered_bytes: size of the reduced gathered memory.
    """
    name = resolved(choice)
    if backend != "gloo" or name == "collectives" or ranks == 1 or not is_large(gathered_bytes):
        return 0
    if name == "auto" and (ranks > MAX_RANKS or system_call() is None):
        return 0
    return PIECE_BYTES
