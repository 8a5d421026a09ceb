"""`OffloadActivations`: tensors that autograd saves are in CPU memory between forward and backward.

    compute   forward: op 0 | op 1 | op 2 ...     backward: op 2 | op 1 | op 0
    copies               out 0 | out 1 ...                   in 1 | in 0

All copies are queued on one stream, a few ahead of the operation that runs.
"""

import weakref
from collections import deque
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ragged_shard.device import CPU, device_layer

from .._schedule.model import member_of
from .._torch.streams import streams_of
from .._torch.tree import local_tensor

SMALLEST = 1 << 16  # bytes; smaller tensors stay on the device
Place = tuple[int, int, int]  # address of a storage in forward, first byte there, and the one behind the last


class OffloadActivations(torch.autograd.graph.saved_tensors_hooks):
    """A context for forwards of a sharded model, which keeps what autograd saves in CPU memory until backward.

        offload = OffloadActivations(model)
        for batch in batches:
            with offload:
                loss = model(batch)
            loss.backward()

    Values are the same bits. Copies run on a separate stream; CPU memory is page-locked, and torch uses it again. No
    effect where the device is the CPU. On the device stay: the last `ahead` tensors of the forward, parameters,
    buffers, gathered memory, tensors below 64 KiB, conjugate and negative views, and tensor subclasses except DTensor.
    Copies back are freed with their node of the graph: with `retain_graph=True` at the graph's end.

    Other saved-tensor hooks inside, such as an activation checkpoint's, see their tensors first: of a checkpoint only
    the inputs move. The context may also be entered inside a module's forward, for that module alone.

    Args:
        model: with units inside, or one itself.
        ahead: how many tensors may be on their way out, or back, while operations run.

    Attributes:
        bytes_out, bytes_in: copied to the CPU and back, since the start.

    Raises:
        ValueError: no unit in the model.
        RuntimeError: in backward: a saved tensor was changed in place before its copy was complete.
    """

    def __init__(self, model: nn.Module, *, ahead: int = 8) -> None:
        member = next(filter(None, map(member_of, model.modules())), None)
        if member is None:
            raise ValueError("OffloadActivations: no module of the model is sharded by fully_shard")
        super().__init__(self._pack, self._unpack)
        device = member.unit.data.device
        self._model, self._ahead, self._layer = model, ahead, device_layer(device)
        self._recycler = streams_of(device).recycler
        self._stream: Any = self._layer.new_stream()
        self.bytes_out = self.bytes_in = self._count = 0
        self._stay: set[int] = set()  # addresses of parameters and buffers
        self._runs: weakref.WeakValueDictionary[int, _Run] = weakref.WeakValueDictionary()
        # Runs in the memory of forward.
        self._places: weakref.WeakValueDictionary[Place, _Run] = weakref.WeakValueDictionary()
        self._leaving: deque[weakref.ref[_Run]] = deque()  # those that are copied out

    def __enter__(self) -> None:
        if self._layer.asynchronous:
            tensors = map(local_tensor, (*self._model.parameters(), *self._model.buffers()))
            self._stay = {tensor.untyped_storage().data_ptr() for tensor in tensors}
            super().__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._layer.asynchronous:
            super().__exit__(*error)

    def _pack(self, tensor: Any) -> Any:
        if type(tensor) is DTensor:
            names, context = tensor.__tensor_flatten__()
            parts = {name: self._pack(getattr(tensor, name)) for name in names}
            return partial(self._rebuilt, parts, context, tensor.shape, tensor.stride())
        if not isinstance(tensor, torch.Tensor) or not self._moves(tensor):
            return tensor
        tensor = tensor.detach()  # an operation's result would keep its graph alive
        storage, first = tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.itemsize
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start, stop = first, first + (last + 1) * tensor.itemsize
        if 2 * (stop - start) > storage.nbytes():  # views of most of a storage share one run
            start, stop = 0, storage.nbytes()
        place = (storage.data_ptr(), start, stop)
        run = self._places.get(place)
        if run is None or run.version != tensor._version:
            run = self._places[place] = self._runs[self._count] = _Run(self, self._count, tensor, place)
            self._count += 1
            self._send(run)
        return partial(self._view, run, tensor.dtype, first - start, tensor.shape, tensor.stride())

    def _moves(self, tensor: torch.Tensor) -> bool:
        plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
        plain = plain and not (tensor.is_conj() or tensor.is_neg())
        own = self._layer.device
        if not plain or tensor.device not in (own, torch.device(own.type)) or tensor.nbytes < SMALLEST:
            return False
        storage = tensor.untyped_storage()
        return storage.data_ptr() not in self._stay and not self._recycler.lends(storage)

    def _send(self, run: "_Run") -> None:
        """Start copying a run out, and free the device memory of an earlier one, after its copy."""
        assert run.device is not None
        run.host = torch.empty(run.nbytes, dtype=torch.uint8, device=CPU, pin_memory=True)
        with self._layer.on(self._stream, [self._layer.record()]):
            run.host.copy_(run.device, non_blocking=True)
        run.copied = self._layer.record(self._stream)
        self.bytes_out += run.nbytes
        self._leaving.append(weakref.ref(run))
        while len(self._leaving) > self._ahead:
            sent = self._leaving.popleft()()
            if sent is not None:
                sent.wait()
                if not sent.changed:
                    sent.source = sent.device = None
                self._places.pop(sent.place, None)

    def _fetch(self, run: "_Run") -> None:
        """Start copying a run back, if it is not on the device."""
        if run.device is None:
            assert run.host is not None
            run.device = torch.empty(run.nbytes, dtype=torch.uint8, device=self._layer.device)
            with self._layer.on(self._stream, [self._layer.record()]):
                run.device.copy_(run.host, non_blocking=True)
            run.copied = self._layer.record(self._stream)
            self.bytes_in += run.nbytes

    def _unpack(self, saved: Any) -> Any:
        return saved() if isinstance(saved, partial) else saved

    def _rebuilt(self, parts: dict[str, Any], context: Any, size: torch.Size, stride: Any) -> Any:
        inner = {name: self._unpack(part) for name, part in parts.items()}
        return DTensor.__tensor_unflatten__(inner, context, size, stride)

    def _view(self, run: "_Run", dtype: torch.dtype, offset: int, size: Any, stride: Any) -> torch.Tensor:
        """A saved tensor, a view of a run: `offset` bytes after its start."""
        for back in range(1 + self._ahead):  # backward goes from the last to the first
            if (near := self._runs.get(run.number - back)) is not None:
                self._fetch(near)
        run.wait()
        if run.changed:
            assert run.source is not None
            raise RuntimeError(
                f"a tensor of shape {tuple(run.source.shape)} that backward needs was changed in place after it was "
                f"saved (version {run.source._version}, expected {run.version}), while its activations are offloaded; "
                "compute the change out of place"
            )
        assert run.device is not None
        offset += int(run.device.storage_offset())
        view = torch.empty(0, dtype=dtype, device=run.device.device)
        return view.set_(run.device.untyped_storage(), offset // dtype.itemsize, size, stride)


class _Run:
    """A run of bytes of one storage, in which tensors that autograd saved are; `number` is its place in their order."""

    def __init__(self, owner: OffloadActivations, number: int, source: torch.Tensor, place: Place) -> None:
        _, start, stop = place
        self.number, self.place, self.nbytes, self._layer = number, place, stop - start, owner._layer
        # a tensor in the storage of forward, whose version shows changes in place; None once that is freed
        self.source: torch.Tensor | None = source
        self.version = source._version
        flat = torch.empty(0, dtype=torch.uint8, device=source.device)
        # the bytes there, uint8; None while they are in CPU memory only
        self.device: torch.Tensor | None = flat.set_(source.untyped_storage(), start, (self.nbytes,), (1,))
        self.host: torch.Tensor | None = None  # the bytes in CPU memory
        self.copied: Any = None  # event after the copy of the bytes that is in flight

    @property
    def changed(self) -> bool:
        """Whether the bytes were changed in place since autograd saved them, so that the copy may differ."""
        return self.source is not None and self.source._version != self.version

    def wait(self) -> None:
        """Let the current stream wait for the copy in flight."""
        if self.copied is not None:
            self._layer.wait(self.copied)
            self.copied = None

    __del__ = wait  # memory that a copy may still read or write is freed after it
