"""How bytes get from rank to rank: one protocol, several ways, one choice for each process group.

    collectives     torch.distributed's own: everywhere
    peer_memory     each rank reads the others' memory: large exchanges of gloo ranks on one machine

`peer/` has what peer memory needs; it is imported where a process group may use it.
Knows process groups and tensors; nothing of layouts or buffers.
"""

from .choice import TRANSPORT_VARIABLE, TransportChoice, arena_of, resolved, transport_of
from .collectives import Coalesced, Collectives
from .protocol import Op, Pairs, Transport, Work

__all__ = [
    "TRANSPORT_VARIABLE",
    "Coalesced",
    "Collectives",
    "Op",
    "Pairs",
    "Transport",
    "TransportChoice",
    "Work",
    "arena_of",
    "resolved",
    "transport_of",
]
