"""Resources that all units on a device share: communication streams, and recycled memory of gathered buffers."""

import weakref
from typing import Any

import torch

from dbuffer import shared_recycler
from ragged_shard.device import DeviceLayer, device_layer


class Streams:
    """Streams and recycled memory of one device."""

    def __init__(self, layer: DeviceLayer) -> None:
        self.layer = layer  # streams and events of the device
        self.recycler = shared_recycler(layer.device)  # where gathered memory comes from
        self._compute: Any = layer.current_stream()
        # gather, reduce, replicate: where all-gathers, reduce-scatters and sums over replicas are launched;
        # None on CPU
        self.gather: Any = layer.new_stream(priority=-1)
        self.reduce: Any = layer.new_stream(priority=-1)
        self.replicate: Any = layer.new_stream()

    def take_back(self) -> None:
        """Let memory that ends from now on be free only behind all that uses it: a model may die in mid-flight.

        Gathered memory goes back to the gathers' stream, shards and gradients to the computation's.
        """
        self.layer.wait(self.layer.record(self._compute), self.gather)
        for stream in (self.gather, self.reduce, self.replicate):
            self.layer.wait(self.layer.record(stream), self._compute)

    def reduced(self) -> list[Any]:
        """Events after all reductions, and the users' hooks in them, which may write to shards."""
        return [self.layer.record(stream) for stream in (self.reduce, self.replicate)]


# One for each device, as long as a unit uses it: models in one process gather one after the other anyway.
_known: "weakref.WeakValueDictionary[DeviceLayer, Streams]" = weakref.WeakValueDictionary()


def streams_of(device: torch.device) -> Streams:
    """The streams of a device."""
    layer = device_layer(device)
    streams = _known.get(layer)
    if streams is None:
        streams = _known[layer] = Streams(layer)
    return streams
