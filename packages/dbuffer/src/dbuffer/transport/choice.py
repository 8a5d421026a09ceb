"""Which transport a process group gets: chosen once, the same on all ranks, and logged.

"auto"          for large exchanges of a gloo group peer memory (2 to 16 ranks), else sends (2 to 4); else collectives
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
from .direct import Direct, Mover, is_large
from .handshake import connect
from .peer_memory import PIECE_BYTES, PeerMemory
from .process_memory import system_call
from .protocol import Transport
from .sends import Sends

TRANSPORT_VARIABLE = "DBUFFER_TRANSPORT"
READ_RANKS = 16  # most for which "auto" reads peers' memory: where it was measured
SEND_RANKS = 4  # most for which "auto" sends: each sends to each
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
    obstacle = (
        "" if compat.is_gloo(group) else f"the backend is {dist.get_backend_config(group)}, not cpu:gloo"
    )
    if choice == "auto" and not obstacle and group.size() > READ_RANKS:
        obstacle = f"it has {group.size()} ranks, more than {READ_RANKS}"
    if not obstacle:
        return Direct(group, choice, _CONNECT[choice])
    if choice != "auto":
        raise ValueError(
            f"transport {choice!r} serves gloo groups only, and of this process group {obstacle}; choose 'auto' or "
            "'collectives'"
        )
    _log.info("process group %s: collectives; no direct exchange: %s", group.group_name, obstacle)
    return Collectives(group)


def _chosen_by_trying(group: dist.ProcessGroup) -> Mover | None:
    peers, trouble = connect(group)
    if not trouble:
        _log.info("process group %s: peer_memory for large exchanges", group.group_name)
        return PeerMemory(peers, compat.timeout_seconds(group))
    few = group.size() <= SEND_RANKS
    name = Sends.name if few else Collectives.name
    _log.info("process group %s: %s for large exchanges; no peer memory: %s", group.group_name, name, trouble)
    return Sends(group) if few else None


def _peer_memory(group: dist.ProcessGroup) -> Mover:
    peers, trouble = connect(group)
    if trouble:
        raise ValueError(f"transport 'peer_memory' is not possible for this process group: {trouble}")
    _log.info("process group %s: peer_memory for large exchanges, as chosen", group.group_name)
    return PeerMemory(peers, compat.timeout_seconds(group))


def _sends(group: dist.ProcessGroup) -> Mover:
    _log.info("process group %s: sends for large exchanges, as chosen", group.group_name)
    return Sends(group)


_CONNECT: dict[str, Callable[[dist.ProcessGroup], Mover | None]] = {
    "auto": _chosen_by_trying,
    "sends": _sends,
    "peer_memory": _peer_memory,
}


def reduction_scratch_bytes(
    gathered_bytes: int, ranks: int, *, backend: str = "gloo", choice: TransportChoice | None = None
) -> int:
    """What a reduction of so many gathered bytes holds in addition while it is under way; 0 for collectives.

    With peer memory one piece of what a peer gives; with sends all that peers give. "auto" counts as peer memory for up
    to 16 ranks where the platform has it: whether ranks may read each other's memory is known only when they have
    tried. Of torch's own collectives it is not known what the backend holds inside. For plans made before there is a
    group.
    """
    chosen = resolved(choice)
    if chosen == "auto" and ranks <= READ_RANKS and system_call() is not None:
        chosen = "peer_memory"
    elif chosen == "auto":
        chosen = "sends" if ranks <= SEND_RANKS else "collectives"
    if backend != "gloo" or chosen == "collectives" or ranks == 1 or not is_large(gathered_bytes):
        return 0
    return PIECE_BYTES if chosen == "peer_memory" else gathered_bytes // ranks * (ranks - 1)
