"""Chooses the transport of a process group: once, the same on all ranks, and logged.

"auto"          peer memory for large exchanges of a gloo group of 2 to 16 ranks, if they can map each other's memory;
                else collectives
"collectives"   torch.distributed's collectives for everything, on a GPU in the stream that they are called in
"peer_memory"   peer memory for large exchanges; ValueError where that is not possible
a callable      called once with the process group, returns the caller's `Transport`
"""

import logging
import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist

from .. import _torch_compat as compat
from .collectives import Collectives
from .protocol import Transport

if TYPE_CHECKING:
    from .peer.arena import Arena
    from .peer.peer_memory import PeerMemory

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


def arena_of(group: dist.ProcessGroup, choice: TransportChoice) -> "Arena | None":
    """Memory for buffers whose ranks may read each other's; None where they cannot. Communicates nothing."""
    if group.size() == 1 or choice not in ("auto", "peer_memory") or _obstacle(group, choice):
        return None
    from .peer.arena import arena

    try:
        return arena()
    except OSError:
        return None


def _obstacle(group: dist.ProcessGroup, choice: TransportChoice) -> str:
    """The reason why a group cannot use peer memory, as far as it is known before its ranks try; or ""."""
    if not compat.is_gloo(group):
        return f"the backend is {dist.get_backend_config(group)}, not cpu:gloo"
    if choice == "auto" and group.size() > MAX_RANKS:
        return f"it has {group.size()} ranks, more than {MAX_RANKS}"
    return ""


def _made(group: dist.ProcessGroup, choice: str) -> Transport:
    if choice == "collectives" or group.size() == 1:
        return Collectives(group)
    obstacle = _obstacle(group, choice)
    if not obstacle:
        from .peer.direct import Direct

        return Direct(group, choice, partial(_connect, choice))
    if choice != "auto":
        raise ValueError(
            f"transport {choice!r} serves gloo groups only, and of this process group {obstacle}; choose 'auto' or "
            "'collectives'"
        )
    _log.info("process group %s: collectives; no peer memory: %s", group.group_name, obstacle)
    return Collectives(group)


def _connect(choice: str, group: dist.ProcessGroup) -> "PeerMemory | None":
    """The connections of a group, or None if its ranks cannot map each other's memory. See `connect`.

    Raises:
        ValueError: peer memory was chosen by name, and is not possible.
    """
    from .peer.handshake import connect
    from .peer.peer_memory import PeerMemory

    peers, trouble = connect(group)
    if not trouble:
        chosen = "" if choice == "auto" else ", as chosen"
        _log.info("process group %s: peer_memory for large exchanges%s", group.group_name, chosen)
        return PeerMemory(peers, compat.timeout_seconds(group))
    if choice != "auto":
        raise ValueError(f"transport {choice!r} is not possible for this process group: {trouble}")
    _log.info("process group %s: collectives; no peer memory: %s", group.group_name, trouble)
    return None
