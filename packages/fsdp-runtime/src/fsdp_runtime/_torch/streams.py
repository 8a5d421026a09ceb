"""Resources that all units on a device share: communication streams, and recycled memory of gathered buffers."""

import weakref
from typing import Any

import torch

from dbuffer import shared_recycler
from ragged_shard.device import DeviceLayer, device_layer


class Streams:
    """Streams and recycled memory of one device.

    Attributes:
        layer: streams and events of the device.
        recycler: where gathered memory comes from.
        gather, reduce: where all-gathers and reductions are launched; None on CPU.
    """

    def __init__(self, layer: DeviceLayer) -> None:
        self.layer = layer
        self.recycler = shared_recycler(layer.device, lean=True)
        self.recycler.home = layer.current_stream()
        self.gather: Any = layer.new_stream(priority=-1)
        self.reduce: Any = layer.new_stream(priority=-1)

    def take_back(self) -> None:
        """Let memory that ends from now on, used by collectives under way or not, be free only behind them."""
        for stream in (self.gather, self.reduce):
            self.layer.wait(self.layer.record(stream), self.recycler.home)


# One for each device, as long as a unit uses it: models in one process gather one after the other anyway.
_known: "weakref.WeakValueDictionary[DeviceLayer, Streams]" = weakref.WeakValueDictionary()


def streams_of(device: torch.device) -> Streams:
    """The streams of a device."""
    layer = device_layer(device)
    streams = _known.get(layer)
    if streams is None:
        streams = _known[layer] = Streams(layer)
    return streams
