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
    """

    def __init__(self, device: torch.device) -> None:
        self.layer = device_layer(device)
        self.recycler = shared_recycler(self.layer.device, lean=True)
        self._made: tuple[Any, Any] | None = None

    @property
    def gather(self) -> Any:
        """Where all-gathers are launched; None on CPU."""
        return (self._made or self._make())[0]

    @property
    def reduce(self) -> Any:
        """Where reductions are launched; None on CPU."""
        return (self._made or self._make())[1]

    def _make(self) -> tuple[Any, Any]:
        self._made = (self.layer.new_stream(priority=-1), self.layer.new_stream(priority=-1))
        return self._made


# One for each device, as long as a unit uses it: models in one process gather one after the other anyway.
_known: "weakref.WeakValueDictionary[torch.device, Streams]" = weakref.WeakValueDictionary()


def streams_of(device: torch.device) -> Streams:
    """The streams of a device."""
    found = _known.get(device)
    if found is None:
        found = _known[device] = Streams(device)
    return found
