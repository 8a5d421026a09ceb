"""Streams, events and memory of a device behind one small interface, the same for every accelerator and for CPU.

All that depends on the name of a device is decided here, for the other packages too.

On CPU work happens where it is called: there are no streams, events are None, and every method does nothing.
Nothing here calls `record_stream`: code that frees memory records an event after its last use.
"""

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

__all__ = ["CPU", "DeviceLayer", "device_layer", "has_triton", "is_cpu", "use_device_layer"]

CPU = torch.device("cpu")
#: The kinds of device that a simulated process group stands for.
SIMULATED = [CPU.type, "cuda", "meta"]


def is_cpu(device: torch.device) -> bool:
    """Whether work happens where it is called."""
    return device.type == CPU.type


def num_devices(kind: str) -> int:
    """How many devices of an accelerator's kind this machine has. Raises ValueError where torch knows no such kind."""
    try:
        named = torch.device(kind)
    except RuntimeError:
        raise ValueError(f"device {kind!r}: expected 'cpu' or an accelerator such as 'cuda'") from None
    here: torch.device | None = torch.accelerator.current_accelerator(check_available=True)
    return 0 if here is None or here.type != named.type else torch.accelerator.device_count()


def has_triton(device: torch.device) -> bool:
    """Whether Triton is installed and the kernels of these packages have been written for this kind of device.

    They have PTX in them, which ROCm's Triton does not take although its devices are called CUDA's.
    """
    on_cuda = device.type == "cuda" and torch.version.hip is None
    return on_cuda and importlib.util.find_spec("triton") is not None


class DeviceLayer:
    """Streams and events of one device; this class is the one for CPU, where there are none."""

    asynchronous = False  # whether work is queued on streams, so that events mean something
    # whether work is recorded into a graph, so that the CPU may neither wait for the device nor ask it
    capturing: bool = False

    def __init__(self, device: torch.device) -> None:
        self.device = device  # with its index, where the kind of device has one

    def new_stream(self, priority: int = 0) -> Any:
        """A new stream, or None on CPU. A lower priority number runs earlier."""
        return None

    def current_stream(self) -> Any:
        """The stream that work is queued on now, or None on CPU."""
        return None

    def on(self, stream: Any, after: Iterable[Any] | None = None) -> AbstractContextManager[Any]:
        """Queue work on `stream` (None: the current one), after `after` has completed.

        Args:
            stream: from `new_stream` or `current_stream`.
            after: events to wait for. None: all that the current stream holds by now, which is always safe.
                Empty: nothing.
        """
        return nullcontext()

    def record(self, stream: Any = None) -> Any:
        """An event after all work queued on `stream` (None: the current one); None on CPU."""
        return None

    def wait(self, event: Any, stream: Any = None) -> None:
        """Let later work of `stream` (None: the current one) start after `event`. Does not block the CPU."""

    def wait_for_users(self, event: Any, stream: Any = None) -> None:
        """Like `wait`, for an event of a user, of any class: `torch.cuda.Event` is one that `torch.Stream` ignores."""

    def wait_on_host(self, event: Any) -> None:
        """Block the CPU until `event` has completed; None has."""

    def has_completed(self, event: Any) -> bool:
        """Whether `event` has completed; None has. Does not block."""
        return True

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in page-locked memory of the CPU, to be read after an event; on the CPU the tensor itself."""
        return tensor

    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a small tensor of the CPU on the device, without blocking the CPU; on the CPU the tensor itself."""
        return tensor

    def synchronize(self) -> None:
        """Block the CPU until the device has done all its work."""

    #: resize(storage, nbytes) gives a storage memory of the current stream's pool; 0 bytes give it back there.
    resize: Callable[[torch.UntypedStorage, int], object] = staticmethod(torch.UntypedStorage.resize_)


class StreamLayer(DeviceLayer):
    """Streams and events of an accelerator, through torch's device-generic classes."""

    asynchronous = True

    @property
    def capturing(self) -> bool:  # type: ignore[override]  # a plain attribute on CPU, where it is asked often
        """Whether the current stream records into a graph."""
        stream = self.current_stream()
        asked = getattr(stream, "is_capturing", None)  # torch 2.11 has it for CUDA's own streams only
        if asked is not None:
            return bool(asked())
        return stream.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def new_stream(self, priority: int = 0) -> Any:
        """A new stream of this device."""
        return torch.Stream(self.device, priority=priority)

    def current_stream(self) -> Any:
        """The stream that work of this device is queued on now."""
        return torch.accelerator.current_stream(self.device)

    def _use(self, stream: Any) -> AbstractContextManager[Any]:
        """Queue work on a stream while inside."""
        context: AbstractContextManager[Any] = stream
        return context

    def _new_event(self) -> Any:
        return torch.Event(self.device)

    @contextmanager
    def on(self, stream: Any, after: Iterable[Any] | None = None) -> Iterator[None]:
        """Queue work on `stream`, after `after` has completed; see `DeviceLayer.on`."""
        current = self.current_stream()
        stream = current if stream is None else stream
        if after is None and stream != current:
            self.wait(self.record(current), stream)
        for event in after or ():
            self.wait(event, stream)
        with self._use(stream):
            yield

    def record(self, stream: Any = None) -> Any:
        """An event after all work queued on the stream."""
        event = self._new_event()
        event.record(self.current_stream() if stream is None else stream)
        return event

    def wait(self, event: Any, stream: Any = None) -> None:
        """Let later work of the stream start after `event`; None has completed already."""
        if event is not None:
            (self.current_stream() if stream is None else stream).wait_event(event)

    def wait_for_users(self, event: Any, stream: Any = None) -> None:
        """Let later work of the stream start after an event of any class, which waits on the current stream."""
        with self.on(stream, ()):
            event.wait()

    def wait_on_host(self, event: Any) -> None:
        """Block the CPU until `event` has completed."""
        if event is not None:
            event.synchronize()

    def has_completed(self, event: Any) -> bool:
        """Whether `event` has completed."""
        return event is None or bool(event.query())

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in page-locked memory of the CPU, queued on the current stream."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device=CPU, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy by way of page-locked memory, queued on the current stream."""
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device=CPU, pin_memory=True)
        return pinned.copy_(tensor).to(self.device, non_blocking=True)

    def synchronize(self) -> None:
        """Block the CPU until the device has done all its work."""
        torch.accelerator.synchronize(self.device)


_layers: dict[torch.device, DeviceLayer] = {}


def device_layer(device: torch.device | str) -> DeviceLayer:
    """The layer for a device, its index filled in. Raises ValueError: neither cpu nor this machine's accelerator."""
    device = torch.device(device)
    layer = _layers.get(device)
    if layer is not None:
        return layer
    if device.type == CPU.type:
        return _layers.setdefault(device, DeviceLayer(CPU))
    accelerator: torch.device | None = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device.type:
        current = "there is none" if accelerator is None else f"it is {accelerator.type}"
        raise ValueError(f"device {device}: expected cpu or the accelerator of this machine; {current}")
    index: int | None = device.index
    if index is None:  # the current one, which may change
        return device_layer(torch.device(device.type, torch.accelerator.current_device_index()))
    return _layers.setdefault(device, StreamLayer(device))


@contextmanager
def use_device_layer(layer: DeviceLayer) -> Iterator[None]:
    """Inside, `device_layer` gives this layer for its kind of device: a simulated device, say.

    Objects that were built outside keep their layer.
    """
    replaced = {torch.device(layer.device.type), layer.device}
    before = {device: _layers.get(device) for device in replaced}
    _layers.update(dict.fromkeys(replaced, layer))
    try:
        yield
    finally:
        for device, known in before.items():
            del _layers[device]
            if known is not None:
                _layers[device] = known
