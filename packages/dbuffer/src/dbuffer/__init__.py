"""One flat buffer per group of parameters: views instead of copies, collectives in place.

After the DBuffer of veScale-FSDP (arXiv 2602.22437). Start with `DBuffer`. What this module exports is public;
its rooms are `memory`, `transport`, the buffer, and the collectives on
it. `dbuffer.encodings`, imported only by who uses it, has codes for gathers, reductions and shards.
"""

from ._buffer import DBuffer
from ._collectives import AllReduce, Gather, Handle, ReduceScatter
from ._encoding import Encoder, ReductionForm, WireForm
from ._order import CollectiveOrder, start_collective, wait_in_order, watch_order
from .memory.geometry import Geometry, TensorSlice, geometry_of
from .memory.recycler import Recycler, RecyclerStats, Scratch, ShardMemory, hold_forever, shared_recycler
from .transport import Collectives, Op, Pairs, Transport, TransportChoice, Work

__version__ = "0.2.0"
__all__ = [
    "AllReduce",
    "CollectiveOrder",
    "Collectives",
    "DBuffer",
    "Encoder",
    "Gather",
    "Geometry",
    "Handle",
    "Op",
    "Pairs",
    "Recycler",
    "RecyclerStats",
    "ReduceScatter",
    "ReductionForm",
    "Scratch",
    "ShardMemory",
    "TensorSlice",
    "Transport",
    "TransportChoice",
    "WireForm",
    "Work",
    "geometry_of",
    "hold_forever",
    "shared_recycler",
    "start_collective",
    "wait_in_order",
    "watch_order",
]
