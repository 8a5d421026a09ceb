"""One flat buffer per group of parameters: views instead of copies, collectives in place.

After the DBuffer of veScale-FSDP (arXiv 2602.22437). Start with `DBuffer`.
"""

from ._buffer import DBuffer
from ._collectives import all_gather, all_reduce, reduce_scatter
from ._device import DeviceLayer, device_layer
from ._direct import received_bytes
from ._handle import Handle
from ._recycler import Recycler, RecyclerStats, shared_recycler
from ._wire import CastOnWire, Transfer, WireForm

__version__ = "0.2.0"
__all__ = [
    "CastOnWire",
    "DBuffer",
    "DeviceLayer",
    "Handle",
    "Recycler",
    "RecyclerStats",
    "Transfer",
    "WireForm",
    "all_gather",
    "all_reduce",
    "device_layer",
    "received_bytes",
    "reduce_scatter",
    "shared_recycler",
]
