"""One flat buffer per group of parameters: views instead of copies, collectives in place.

After the DBuffer of veScale-FSDP (arXiv 2602.22437). Start with `DBuffer`. What this module exports is public;
its rooms are `memory`, `transport`, the buffer, and the collectives on
it. `dbuffer.encodings`, imported only by who uses it, has codes for gathers, reductions and shards.
"""

from ._buffer import DBuffer
from ._collectives import AllReduce, Gather, Handle, HandleState, ReduceScatter
from ._encoding import Encoder, ReductionForm, WireForm
from ._order import CollectiveOrder, watch_order
from ._patient_calls import PatientStore
from ._progress import Waiting, times_started, waiting
from .memory.geometry import Geometry, TensorSlice, geometry_of
from .memory.recycler import DebugRecycler, Recycler, RecyclerStats, Scratch, hold_forever, shared_recycler
from .transport import Collectives, Op, Pairs, Transport, TransportChoice, Work

__version__ = "0.2.0"
__all__ = [
    "AllReduce",
    "CollectiveOrder",
    "Collectives",
    "DBuffer",
    "DebugRecycler",
    "Encoder",
    "Gather",
    "Geometry",
    "Handle",
    "HandleState",
    "Op",
    "Pairs",
    "PatientStore",
    "Recycler",
    "RecyclerStats",
    "ReduceScatter",
    "ReductionForm",
    "Scratch",
    "TensorSlice",
    "Transport",
    "TransportChoice",
    "Waiting",
    "WireForm",
    "Work",
    "geometry_of",
    "hold_forever",
    "shared_recycler",
    "times_started",
    "waiting",
    "watch_order",
]
