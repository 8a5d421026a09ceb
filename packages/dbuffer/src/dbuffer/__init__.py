"""One flat buffer per group of parameters: views instead of copies, collectives in place.

After the DBuffer of veScale-FSDP (arXiv 2602.22437). Start with `DBuffer`. What this module exports is public;
its rooms are `memory`, `wire`, `transport`, the collectives on them, and the buffer on top.
"""

from ._buffer import DBuffer, all_gather, all_reduce, prepare_gather, prepare_reduction, reduce_scatter
from ._collectives import Gather, ReduceScatter
from ._device import DeviceLayer, device_layer
from ._handle import Handle, HandleState
from .memory.geometry import Geometry, TensorSlice, geometry_of
from .memory.recycler import DebugRecycler, Recycler, RecyclerStats, shared_recycler
from .transport import Transport, TransportChoice, Work, reduction_scratch_bytes
from .wire import (
    BlockFormat,
    BlockFP8,
    BlockInt8,
    BlockNF4,
    CastOnWire,
    Encoder,
    Noise,
    RowRun,
    RunList,
    TileGrid,
    WireForm,
)

__version__ = "0.2.0"
__all__ = [
    "BlockFP8",
    "BlockFormat",
    "BlockInt8",
    "BlockNF4",
    "CastOnWire",
    "DBuffer",
    "DebugRecycler",
    "DeviceLayer",
    "Encoder",
    "Gather",
    "Geometry",
    "Handle",
    "HandleState",
    "Noise",
    "Recycler",
    "RecyclerStats",
    "ReduceScatter",
    "RowRun",
    "RunList",
    "TensorSlice",
    "TileGrid",
    "Transport",
    "TransportChoice",
    "WireForm",
    "Work",
    "all_gather",
    "all_reduce",
    "device_layer",
    "geometry_of",
    "prepare_gather",
    "prepare_reduction",
    "reduce_scatter",
    "reduction_scratch_bytes",
    "shared_recycler",
]
