"""What all units on a device share: streams for communication, and the memory that gathered buffers take turns in."""

import weakref
from typing import Any

import torch

from dbuffer import device_layer, shared_recycler


class Streams:
    """Streams and recycled memory of one device.

    Attributes:
        layer: streams and events of the device.
        recycler: where gathered memory comes from.
        gather, reduce: where all-gathers and reductions are launched; None on CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.layer = device_layer(device)
        self.recycler = shared_recycler(self.layer.device, lean=True)
        self.gather: Any = self.layer.new_stream(priority=-1)
        self.reduce: Any = self.layer.new_stream(priority=-1)


# One for each device, as long as a unit uses it: models in one process gather one after the other anyway.
_known: "weakref.WeakValueDictionary[torch.device, Streams]" = weakref.WeakValueDictionary()


def streams_of(device: torch.device) -> Streams:
    """The streams of a device."""
    found = _known.get(device)
    if found is None:
        found = _known[device] = Streams(device)
    return found
