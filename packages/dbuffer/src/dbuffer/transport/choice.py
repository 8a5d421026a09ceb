"""Which transport a process group gets: chosen once, the same on all ranks, and logged.

"auto"          peer memory, else sends, for large exchanges among 2 to 4 gloo ranks; collectives for the rest
"collectives"   torch.distributed's own for everything
"sends"         sends and receives for large exchanges of a gloo group
"peer_memory"   reading peers' memory for them; an error where that is not possible
a callable      called once with the process group, returns a `Transport` of the caller's
"""

import logging
import os
import weakref
from collections.abc import Callable

import torch.distributed as dist

from .. import _torch_compat as compat
from .collectives import Collectives
from .direct import MAX_RANKS, Direct, Mover, is_large
from .handshake import connect
from .peer_memory import PIECE_BYTES, PeerMemory
from .process_memory import system_call
from .protocol import Transport
from .sends import Sends

TRANSPORT_VARIABLE = "DBUFFER_TRANSPORT"
TransportChoice = str | Callable[[dist.ProcessGroup], Transport]

_NAMES = ("auto", "collectives", "sends", "peer_memory")
_log = logging.getLogger("dbuffer.transport")
# Its groups' ranks make the same calls in the same order; ranks of other groups need not.
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
    given = os.environ.get(TRANSPORT_VARIABLE) or "auto" if choice is None else choice
    if given not in _NAMES:
        source = f"the environment variable {TRANSPORT_VARIABLE}" if choice is None else "transport"
        raise ValueError(
            f"{source} is {given!r}; expected one of {', '.join(_NAMES)}, or a function that makes one of a group"
        )
    return given


def transport_of(group: dist.ProcessGroup, choice: TransportChoice) -> Transport:
    """The transport of a process group; made when it is first asked for, and the same from then on.

    Raises:
        ValueError: this group cannot have the transport that was chosen by name.
    """
    known = _chosen.setdefault(group, {})
    if choice not in known:
        known[choice] = choice(group) if callable(choice) else _made(group, choice)
    return known[choice]


def collectives_of(group: dist.ProcessGroup) -> Collectives:
    """torch.distributed's own collectives."""
    found = transport_of(group, "collectives")
    assert isinstance(found, Collectives)
    return found


def _made(group: dist.ProcessGroup, choice: str) -> Transport:
    if choice == "collectives" or group.size() == 1:
        return Collectives(group)
    obstacle = "" if compat.is_gloo(group) else f"its backend is {dist.get_backend(group)}, not gloo"
    if choice == "auto" and not obstacle and group.size() > MAX_RANKS:
        obstacle = f"it has {group.size()} ranks, and more than {MAX_RANKS} gain nothing"
    if not obstacle:
        return Direct(group, choice, _CONNECT[choice])
    if choice != "auto":
        raise ValueError(
            f"transport {choice!r} serves gloo groups only, and of this process group {obstacle}; choose 'auto' or "
            "'collectives'"
        )
    _log.info("process group %s: collectives; no direct exchange: %s", group.group_name, obstacle)
    return Collectives(group)


def _peer_memory_or_sends(group: dist.ProcessGroup) -> Mover:
    peers, trouble = connect(group)
    if trouble:
        _log.info(
            "process group %s: sends for large exchanges; no peer memory: %s", group.group_name, trouble
        )
        return Sends(group)
    _log.info("process group %s: peer_memory for large exchanges", group.group_name)
    return PeerMemory(peers, compat.timeout_seconds(group))


def _peer_memory(group: dist.ProcessGroup) -> Mover:
    peers, trouble = connect(group)
    if trouble:
        raise ValueError(f"transport 'peer_memory' is not possible for this process group: {trouble}")
    _log.info("process group %s: peer_memory for large exchanges, as chosen", group.group_name)
    return PeerMemory(peers, compat.timeout_seconds(group))


def _sends(group: dist.ProcessGroup) -> Mover:
    _log.info("process group %s: sends for large exchanges, as chosen", group.group_name)
    return Sends(group)


_CONNECT: dict[str, Callable[[dist.ProcessGroup], Mover]] = {
    "auto": _peer_memory_or_sends,
    "sends": _sends,
    "peer_memory": _peer_memory,
}


def reduction_scratch_bytes(
    gathered_bytes: int, ranks: int, *, backend: str = "gloo", choice: TransportChoice | None = None
) -> int:
    """What a reduction of so many gathered bytes holds in addition while it is under way; 0 for collectives.

    With peer memory one piece of what a peer gives; with sends all that peers give. "auto" counts as peer memory where
    the platform has it: whether ranks may read each other's memory is known only when they have tried. Of torch's own
    collectives it is not known what the backend holds inside. For plans made before there is a group.
    """
    chosen = resolved(choice)
    direct = backend == "gloo" and chosen != "collectives" and (chosen != "auto" or ranks <= MAX_RANKS)
    if not direct or ranks == 1 or not is_large(gathered_bytes):
        return 0
    if chosen == "peer_memory" or (chosen == "auto" and system_call() is not None):
        return PIECE_BYTES
    return gathered_bytes // ranks * (ranks - 1)
