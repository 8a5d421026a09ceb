"""Streams and events behind one small interface, so that code above is the same on CUDA and on CPU.

On CPU work happens where it is called: streams and events mean nothing there and every method does nothing.
Nothing here calls `record_stream`: who frees memory says, with an event, when its last use ends.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


class DeviceLayer:
    """Streams and events of one device; this class is the one for CPU, where there are none.

    Attributes:
        device: with its index, where the kind of device has one.
        asynchronous: whether work is queued on streams, so that events mean something.
    """

    asynchronous = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def new_stream(self, priority: int = 0) -> Any:
        """A new stream, or None on CPU. A lower priority number runs earlier."""
        return None

    def current_stream(self) -> Any:
        """The stream that work is queued on now, or None on CPU."""
        return None

    def on(self, stream: Any, after: Iterable[Any] | None = None) -> AbstractContextManager[Any]:
        """Queue work on `stream` (None: the current one), once `after` is over.

        Args:
            stream: from `new_stream` or `current_stream`.
            after: events to wait for. None: all that the current stream holds by now, which is always safe.
                Empty: nothing.
        """
        return nullcontext()

    def record(self, stream: Any = None) -> Any:
        """An event at the end of what `stream` (None: the current one) holds by now; None on CPU."""
        return None

    def wait(self, event: Any, stream: Any = None) -> None:
        """Let later work of `stream` (None: the current one) start after `event`. Does not block the CPU."""

    def synchronize(self) -> None:
        """Block the CPU until the device has done all its work."""


class CudaLayer(DeviceLayer):
    """Streams and events of one CUDA device."""

    asynchronous = True

    def new_stream(self, priority: int = 0) -> torch.cuda.Stream:
        """A new stream of this device."""
        return torch.cuda.Stream(self.device, priority=priority)

    def current_stream(self) -> torch.cuda.Stream:
        """The stream that work of this device is queued on now."""
        return torch.cuda.current_stream(self.device)

    @contextmanager
    def on(self, stream: Any, after: Iterable[Any] | None = None) -> Iterator[None]:
        """Queue work on `stream`, once `after` is over; see `DeviceLayer.on`."""
        here = self.current_stream()
        stream = here if stream is None else stream
        if after is None and stream != here:
            stream.wait_stream(here)
        for event in after or ():
            self.wait(event, stream)
        with torch.cuda.stream(stream):
            yield

    def record(self, stream: Any = None) -> torch.cuda.Event:
        """An event at the end of what the stream holds by now."""
        event = torch.cuda.Event()
        event.record(self.current_stream() if stream is None else stream)
        return event

    def wait(self, event: Any, stream: Any = None) -> None:
        """Let later work of the stream start after `event`; None is over already."""
        if event is not None:
            (self.current_stream() if stream is None else stream).wait_event(event)

    def synchronize(self) -> None:
        """Block the CPU until the device has done all its work."""
        torch.cuda.synchronize(self.device)


_layers: dict[torch.device, DeviceLayer] = {}


def device_layer(device: torch.device | str) -> DeviceLayer:
    """The layer for a device, its index filled in.

    Raises:
        ValueError: neither cpu nor cuda.
    """
    device = torch.device(device)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        device = torch.device("cuda", index)
    found = _layers.get(device)
    if found is None:
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"device {device}: buffers live on cpu or cuda")
        found = _layers[device] = (
            CudaLayer(device) if device.type == "cuda" else DeviceLayer(torch.device("cpu"))
        )
    return found
