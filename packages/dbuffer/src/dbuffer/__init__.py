"""One flat buffer per group of parameters: views instead of copies, collectives in place.

After the DBuffer of veScale-FSDP (arXiv 2602.22437). Start with `DBuffer`. What this module exports is public;
its rooms are `memory`, `wire`, `transport`, the collectives on them, and the buffer on top.
"""

from ragged_shard import DeviceLayer, device_layer

from ._buffer import DBuffer
from ._collectives import AllReduce, Gather, Handle, HandleState, ReduceScatter
from ._exchange import exchange_scratch_bytes
from ._order import CollectiveOrder, watch_order
from ._patient_calls import PatientStore
from ._progress import Waiting, times_started, waiting
from .memory.geometry import Geometry, TensorSlice, geometry_of
from .memory.recycler import DebugRecycler, Recycler, RecyclerStats, Scratch, hold_forever, shared_recycler
from .transport import Collectives, Op, Pairs, Transport, TransportChoice, Work
from .wire.blocks import BlockFormat
from .wire.codes.at_rest import BlocksAtRest, empty_codes
from .wire.codes.on_wire import BlocksOnWire
from .wire.codes.planes import CodePlanes
from .wire.codes.tensor import BlockQuantizedTensor
from .wire.form import Encoder, WireForm
from .wire.formats.fp8 import BlockFP8
from .wire.formats.int8 import BlockInt8
from .wire.formats.nf4 import BlockNF4
from .wire.noise import Noise
from .wire.reduction import BlockReduction, CastReduction, Reducer, ReductionForm
from .wire.tiles import RowRun, RunList, TileGrid

__version__ = "0.2.0"
__all__ = [
    "AllReduce",
    "BlockFP8",
    "BlockFormat",
    "BlockInt8",
    "BlockNF4",
    "BlockQuantizedTensor",
    "BlockReduction",
    "BlocksAtRest",
    "BlocksOnWire",
    "CastReduction",
    "CodePlanes",
    "CollectiveOrder",
    "Collectives",
    "DBuffer",
    "DebugRecycler",
    "DeviceLayer",
    "Encoder",
    "Gather",
    "Geometry",
    "Handle",
    "HandleState",
    "Noise",
    "Op",
    "Pairs",
    "PatientStore",
    "Recycler",
    "RecyclerStats",
    "ReduceScatter",
    "Reducer",
    "ReductionForm",
    "RowRun",
    "RunList",
    "Scratch",
    "TensorSlice",
    "TileGrid",
    "Transport",
    "TransportChoice",
    "Waiting",
    "WireForm",
    "Work",
    "device_layer",
    "empty_codes",
    "exchange_scratch_bytes",
    "geometry_of",
    "hold_forever",
    "shared_recycler",
    "times_started",
    "waiting",
    "watch_order",
]
