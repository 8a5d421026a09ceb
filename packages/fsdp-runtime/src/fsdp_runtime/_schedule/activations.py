"""Activations of units in CPU memory between forward and backward.

    forward     tensors saved in a unit are noted; when the unit ends, copies to the CPU start, and the device
                memory of the unit before is freed, after its copies; the last unit's is still there in backward
    backward    the first use in a unit starts copies back of tensors that it and the next unit used last time

    compute     forward 0 | forward 1 | forward 2 ...       backward 2 | backward 1 | backward 0
    copies                  out 0     | out 1 ...               in 1   | in 0

All copies are queued on one stream. So CPU memory is used again without waiting: the copy that read it runs first.
"""

import bisect
import operator
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ragged_shard import CPU

from .. import _torch_compat as compat
from .._params.unit import Unit
from .._torch.streams import Streams
from .._torch.tree import local_tensor

SMALLEST = 1 << 16  # bytes; smaller tensors stay on the device
_SIZE = operator.methodcaller("numel")


class _Run:
    """A run of bytes of one storage, in which tensors that autograd saved are.

    Attributes:
        key: number of the forward, and of this run in it.
        place: identity of the storage in forward, first byte there, and the one behind the last.
        device: the bytes there, uint8; None while they are in CPU memory only.
        source: a tensor in the storage of forward, whose version shows changes in place; None once that is freed.
        host: the bytes in CPU memory, once they were sent.
        ready: event after which `device` has them, while a copy back is in flight.
    """

    def __init__(self, key: tuple[int, int], source: torch.Tensor, place: tuple[int, int, int]) -> None:
        _, start, stop = place
        self.key, self.place, self.nbytes = key, place, stop - start
        self.source: torch.Tensor | None = source
        self.version = source._version
        flat = torch.empty(0, dtype=torch.uint8, device=source.device)
        self.device: torch.Tensor | None = flat.set_(source.untyped_storage(), start, (self.nbytes,), (1,))
        self.host: torch.Tensor | None = None
        self.home: list[torch.Tensor] = []  # free CPU memory, where `host` goes in the end
        self.ready: Any = None

    def check(self) -> None:
        """Raise RuntimeError if the bytes were changed in place since autograd saved them."""
        if self.source is not None and self.source._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.source.shape)} that backward needs was changed in place after it was "
                f"saved (version {self.source._version}, expected {self.version}), while its activations are "
                "offloaded; compute the change out of place"
            )

    def __del__(self) -> None:
        if self.host is not None:
            bisect.insort(self.home, self.host, key=_SIZE)


@dataclass(frozen=True, eq=False)
class _Saved:
    """A tensor that autograd saved: a view of a run, by its metadata."""

    run: _Run
    dtype: torch.dtype
    offset: int  # bytes from the start of the run
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _SavedWrapper:
    """A DTensor that autograd saved: its local tensor, as packed, and all else."""

    parts: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


class Activations:
    """Those of the units of one model whose policy offloads them.

    Attributes:
        bytes_out, bytes_in: copied to the CPU and back, since the start.
    """

    def __init__(self, streams: Streams) -> None:
        self._layer, self._recycler = streams.layer, streams.recycler
        self.bytes_out = self.bytes_in = 0
        self._stream: Any = None  # made at the first use
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._entered: list[tuple[nn.Module, AbstractContextManager[None] | None]] = []
        self._stay: set[int] = set()  # storages of parameters and buffers
        self._free: list[torch.Tensor] = []  # CPU memory, by size
        self._forward = self._count = 0
        self._alive: weakref.WeakValueDictionary[tuple[int, int], _Run] = weakref.WeakValueDictionary()
        # Those in the memory of forward, by storage, start and stop.
        self._places: weakref.WeakValueDictionary[tuple[int, int, int], _Run] = weakref.WeakValueDictionary()
        self._new: list[weakref.ref[_Run]] = []  # not sent; they end with their graph
        self._leaving: list[_Run] = []  # sent, and not freed on the device
        self._left: Any = None  # event after which they may be
        self._coming: dict[_Run, None] = {}  # brought back, and not used
        self._used: weakref.WeakSet[_Run] = (
            weakref.WeakSet()
        )  # tensors of a retained graph stay until the end
        self._seen: list[dict[int, None]] = []  # the runs that this backward used, by unit
        self._parts: list[list[int]] = []  # and the last one
        self._part_of: dict[int, int] = {}
        self._part = -1

    # -- forward ----------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """A root's forward begins."""
        self._advance()
        self._forward += 1
        self._count = 0

    def enter(self, unit: Unit, module: nn.Module) -> None:
        """A forward of a module begins, of a unit that offloads its activations; `leave` follows."""
        context = None
        if torch.is_grad_enabled() and compat.backward_id() == -1:
            hooks = compat.saved_tensor_hooks()
            if hooks is None or hooks[0] == self._hooks.pack_hook:
                context = self._hooks
            elif hooks[0].__module__ != torch.utils.checkpoint.__name__:
                _refuse_other_hooks(unit, hooks[0])
        if context is not None:
            if self._stream is None:
                self._stream = self._layer.new_stream()
            if not any(hooks for _, hooks in self._entered):
                self._stay.clear()
            for tensor in (*module.parameters(), *module.buffers()):
                self._stay.add(local_tensor(tensor).untyped_storage()._cdata)
            context.__enter__()
        self._entered.append((module, context))

    def leave(self, unit: Unit, module: nn.Module) -> None:
        """A forward of a unit's module has ended, possibly by raising."""
        if self._entered and self._entered[-1][0] is module:
            _, context = self._entered.pop()
            if context is not None:
                context.__exit__(None, None, None)
        if not unit.root and compat.backward_id() == -1:  # after a root's the loss and backward come
            self._advance()

    def _advance(self) -> None:
        """Free the device memory of the unit before, and start copying out tensors saved since."""
        if self._leaving or self._new:
            self._free_sent()
            self._send()

    def _pack(self, tensor: Any) -> Any:
        if type(tensor) is DTensor:
            names, context = tensor.__tensor_flatten__()
            parts = {name: self._pack(getattr(tensor, name)) for name in names}
            return _SavedWrapper(parts, context, tensor.shape, tensor.stride())
        if not isinstance(tensor, torch.Tensor):
            return tensor
        tensor = tensor.detach()  # an operation's result would keep its graph alive
        if not self._moves(tensor):
            return tensor
        storage, itemsize = tensor.untyped_storage(), tensor.itemsize
        first = int(tensor.storage_offset()) * itemsize
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start, stop = first, first + (last + 1) * itemsize
        if 2 * (stop - start) > storage.nbytes():  # views of most of a storage share one run
            start, stop = 0, storage.nbytes()
        place = (storage._cdata, start, stop)
        run = self._places.get(place)
        if run is None or run.version != tensor._version:
            run = _Run((self._forward, self._count), tensor, place)
            self._count += 1
            run.home = self._free
            self._alive[run.key] = self._places[place] = run
            self._new.append(weakref.ref(run))
        return _Saved(run, tensor.dtype, first - start, tensor.shape, tensor.stride())

    def _moves(self, tensor: torch.Tensor) -> bool:
        plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not plain or not self._is_here(tensor.device) or tensor.nbytes < SMALLEST:
            return False
        if tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        return storage._cdata not in self._stay and not self._recycler.lends(storage)

    def _is_here(self, device: torch.device) -> bool:
        own = self._layer.device
        return device == own or (device.type == own.type and device.index is None)

    def _send(self) -> None:
        """Start copying the tensors saved since the last time."""
        runs = [run for known in self._new if (run := known()) is not None]
        self._new = []
        for run in runs:
            run.check()
        self._leaving = runs
        with self._layer.on(self._stream, [self._layer.record()]):
            for run in runs:
                assert run.device is not None
                run.host = self._host_memory(run.nbytes)
                run.host[: run.nbytes].copy_(run.device, non_blocking=True)
                self.bytes_out += run.nbytes
        self._left = self._layer.record(self._stream)

    @torch.inference_mode(False)  # an evaluation may begin before the last copies of a forward
    def _host_memory(self, nbytes: int) -> torch.Tensor:
        """The smallest free CPU memory that is large enough, or more of it."""
        index = bisect.bisect_left(self._free, nbytes, key=_SIZE)
        if index < len(self._free):
            return self._free.pop(index)
        return torch.empty(nbytes, dtype=torch.uint8, device=CPU, pin_memory=True)

    def _free_sent(self) -> None:
        """Free device memory, after the copies out of it."""
        runs, self._leaving = self._leaving, []
        if not runs:
            return
        self._layer.wait(self._left)
        for run in runs:
            run.check()
            run.source = run.device = None
            self._places.pop(run.place, None)

    # -- backward ---------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """A run of the autograd engine has reached the model."""
        self._seen, self._part = [{}], -1

    def enter_backward(self) -> None:
        """A unit's backward begins."""
        self._seen.append({})

    def _unpack(self, saved: Any) -> Any:
        if isinstance(saved, _SavedWrapper):
            inner = {name: self._unpack(part) for name, part in saved.parts.items()}
            return DTensor.__tensor_unflatten__(inner, saved.context, saved.size, saved.stride)
        return self._view(saved) if isinstance(saved, _Saved) else saved

    def _view(self, saved: _Saved) -> torch.Tensor:
        run = saved.run
        run.check()
        if self._seen:
            self._seen[-1][run.key[1]] = None
        part = self._part_of.get(run.key[1], self._part)
        if part != self._part:
            self._part = part
            ahead = {index: None for indices in self._parts[part : part + 2] for index in indices}
            known = (self._alive.get((run.key[0], index)) for index in ahead)
            self._bring(other for other in known if other is not None)
        self._bring([run])
        if run.ready is not None:
            self._layer.wait(run.ready)
            run.ready = None
            self._coming.pop(run, None)
            self._used.add(run)
        assert run.device is not None
        offset = int(run.device.storage_offset()) + saved.offset
        view = torch.empty(0, dtype=saved.dtype, device=run.device.device)
        view.set_(run.device.untyped_storage(), offset // saved.dtype.itemsize, saved.size, saved.stride)
        return view

    def _bring(self, runs: Iterable[_Run]) -> None:
        """Start copying back the tensors that are not on the device."""
        absent = [run for run in runs if run.device is None]
        if not absent:
            return
        device = self._layer.device
        memory = [torch.empty(run.nbytes, dtype=torch.uint8, device=device) for run in absent]
        with self._layer.on(self._stream, [self._layer.record()]):
            for run, flat in zip(absent, memory, strict=True):
                assert run.host is not None
                flat.copy_(run.host[: run.nbytes], non_blocking=True)
                self.bytes_in += run.nbytes
        ready = self._layer.record(self._stream)
        for run, run.device in zip(absent, memory, strict=True):
            run.ready = ready
            self._coming[run] = None

    def end_backward(self) -> None:
        """The run of the autograd engine has ended: expect its order in the next one."""
        self._parts = [list(part) for part in self._seen if part]
        self._part_of = {
            index: number for number, part in reversed([*enumerate(self._parts)]) for index in part
        }
        self._seen = []
        self.settle()

    def settle(self) -> None:
        """Free the tensors in flight, after their copies; outside of a forward."""
        if self._coming:
            self._layer.wait(self._layer.record(self._stream))
        for run in (*self._coming, *self._used):
            run.device = run.ready = None
        self._coming = {}
        self._used.clear()
        self._free_sent()

    def reset(self) -> None:
        """Forget a pass that was cut off by an exception."""
        while self._entered:
            _, context = self._entered.pop()
            if context is not None:
                context.__exit__(None, None, None)
        self.settle()
        self._new, self._seen = [], []
        self._places.clear()

    def __del__(self) -> None:
        if self._leaving or self._coming:
            self._layer.wait(self._layer.record(self._stream))


def _refuse_other_hooks(unit: Unit, hook: Any) -> NoReturn:
    raise RuntimeError(
        f"{unit.name}: its policy offloads activations, but other saved-tensor hooks are active around it "
        f"({hook.__module__}.{hook.__qualname__}), which would not see what it saves. Use one of the two, or put the "
        "hooks inside the unit"
    )
