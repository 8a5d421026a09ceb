"""A simulated accelerator: ops run at once on CPU, and every access to memory must have an order.

    compute   [ write w ]----event----.            stream clocks are vectors: what of each stream has happened before
    side                          wait '[ read w ]

Each stream has a vector clock. Queueing an op joins the host's clock and ticks the stream's own time;
an event is a copy of a clock; waiting for it joins that copy. Each block of memory remembers who accessed which bytes
at what time. An access that conflicts with one that its stream's clock does not contain is a race, and raises. So are

    a first use without an order after the allocation, on the stream from whose pool the memory came
    giving memory back, or dropping the last tensor on it, before that stream is ordered after all uses

the rules of caching allocators without `record_stream`. All memory belongs to the device, except that allocated
with `pin_memory=True` and results computed from them alone: the host reads and writes these, and must have waited.
"""

import itertools
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ragged_shard import _torch_compat as compat
from ragged_shard.device import CPU, StreamLayer, use_device_layer

Clock = dict[int, int]  # for each stream's number how many of its ops have happened before


class RaceError(AssertionError):
    """Two accesses to memory without an order, or memory given back too early."""


@dataclass(frozen=True)
class Access:
    stream: int
    stream_name: str
    time: int
    writes: bool
    low: int
    high: int
    what: str

    def __str__(self) -> str:
        kind = "write" if self.writes else "read"
        return f"{kind} of bytes {self.low} to {self.high} by {self.what} on {self.stream_name}"


@dataclass(eq=False)
class Block:
    """Memory at one address, from its allocation until it is given back."""

    address: int
    nbytes: int
    home: Any
    on_host: bool
    pinned: bool
    accesses: list[Access] = field(default_factory=list)


@dataclass
class Pools:
    """Memory of a caching allocator: for each stream bytes in use, and their peak."""

    used: dict[str, int] = field(default_factory=dict)  # by the name of the stream of the allocation
    peak: dict[str, int] = field(default_factory=dict)

    @property
    def reserved(self) -> int:
        """The sum of the peaks: memory cached for one stream is not given to another."""
        return sum(self.peak.values())

    def add(self, name: str, nbytes: int) -> None:
        """Count bytes that were allocated, or with a negative number given back."""
        self.used[name] = self.used.get(name, 0) + nbytes
        self.peak[name] = max(self.peak.get(name, 0), self.used[name])


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors that have memory."""
    tensors = [t for t in tree_leaves(tree) if isinstance(t, Tensor) and not isinstance(t, FakeTensor)]
    return [t for t in tensors if not (t.is_meta or t.is_sparse)]


def operands(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor], bool]:
    """Tensors that an op reads, tensors that it writes, and whether the host may go on before it has completed."""
    named = compat.bound(func, args, kwargs)
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for argument in func._schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if written else reads).extend(tensors_in(named[argument.name]))
    return reads, writes, bool(named.get("non_blocking"))


def makes_room(func: Any) -> bool:
    """Whether an op gives memory and writes nothing."""
    name: str = func._schema.name
    return name.startswith(("aten::empty", "aten::new_empty", "aten::set_", "aten::resize_"))


def bytes_of(tensor: Tensor) -> tuple[int, int]:
    """The first byte of its storage that a tensor uses, and the one behind the last."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset()
    return int(start * tensor.itemsize), int((start + last + 1) * tensor.itemsize)


def join(clock: Clock, other: Clock) -> None:
    for number, time in other.items():
        if clock.get(number, 0) < time:
            clock[number] = time


def where() -> str:
    """The innermost lines of code that is neither torch's nor this file's."""
    frame: Any = sys._getframe(1)
    lines: list[str] = []
    while frame is not None and len(lines) < 4:
        path = frame.f_code.co_filename
        if not path.startswith((_TORCH, _PYTHON, _HERE)):
            lines.append(f"{os.path.basename(path)}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(lines)


_HERE = __file__.rpartition(os.sep)[0]
_TORCH = next(iter(torch.__path__))
_PYTHON = os.path.dirname(os.__file__) + os.sep + "contextlib"
# Ops that give the host something that the device has computed.
SYNCS = frozenset(
    f"aten::{name}" for name in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select")
)

_HOST = 0


@dataclass(eq=False)
class SimulatedStream:
    """A queue of ops: its number, and what of every stream has happened before its next op."""

    number: int
    name: str
    clock: Clock = field(default_factory=dict)

    def wait_event(self, event: "SimulatedEvent") -> None:
        """Let later ops start after the event."""
        join(self.clock, event.clock)


@dataclass(eq=False)
class SimulatedEvent:
    """A point of a stream."""

    device: "SimulatedDevice"
    clock: Clock = field(default_factory=dict)

    def record(self, stream: SimulatedStream) -> None:
        """Mark the end of the work that is queued on the stream."""
        self.clock = {**stream.clock}
        join(self.clock, self.device.host)

    def wait(self) -> None:
        """Let later work of the current stream start after it."""
        self.device.current_stream().wait_event(self)

    def query(self) -> bool:
        """Refused: on a device the answer depends on timing, and so would all that follows from it."""
        raise RaceError(f"the host asks at {where()} whether work has completed")

    def synchronize(self) -> None:
        """Block the host until it has completed."""
        join(self.device.host, self.clock)


class SimulatedDevice(StreamLayer):
    """A device layer that checks. A context: inside, it is the layer of the CPU, and ops of this thread are checked.

    Other threads are checked while they are inside `on`. Ops run at once and give the values that CPU gives.

    Args:
        device: "cpu"; with an index ("cpu:0") shards on "cpu" are offloaded from it.

    Raises:
        RaceError: inside, at the second of two accesses without an order, or where memory is given back. What happens
            where no error can be raised (a tensor dies) is raised at the next op, and at the end.
    """

    capturing: bool = False  # tests set it

    def __init__(self, device: str = CPU.type) -> None:
        super().__init__(torch.device(device))
        self.host: Clock = {}  # the clock of everything that the host has waited for
        self.pools = Pools()  # memory that a caching allocator would hold
        self.accesses = 0  # how many were checked
        self._numbers = itertools.count(1)
        self._default = self.new_stream()
        self._default.name = "the default stream"
        self._here = threading.local()
        self._blocks: dict[int, Block] = {}
        self._finalizers: list[Any] = []
        self._late: list[RaceError] = []
        self._mode = _Stamp(self)
        self._lock = threading.RLock()

    @contextmanager
    def _inside(self) -> Iterator["SimulatedDevice"]:
        try:
            with use_device_layer(self), self._mode:
                yield self
            self.raise_late()
        finally:
            for finalizer in self._finalizers:
                finalizer.detach()
            self._blocks.clear()

    def __enter__(self) -> "SimulatedDevice":
        self._context = self._inside()
        return self._context.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._context.__exit__(*exception)

    def raise_late(self) -> None:
        """Raise the first race that was detected in a place that cannot raise."""
        if self._late:
            raise self._late.pop(0)

    # -- the layer --------------------------------------------------------------------------------------------------

    def new_stream(self, priority: int = 0) -> SimulatedStream:
        """A new stream."""
        number = next(self._numbers)
        return SimulatedStream(number, f"stream {number}")

    def current_stream(self) -> SimulatedStream:
        """This thread's."""
        return getattr(self._here, "stream", self._default)

    @contextmanager
    def _use(self, stream: Any) -> Iterator[None]:
        before = self.current_stream()
        self._here.stream = stream
        try:
            if compat.mode_is_active(self._mode):
                yield
            else:
                with self._mode:
                    yield
        finally:
            self._here.stream = before

    def _new_event(self) -> SimulatedEvent:
        return SimulatedEvent(self)

    def synchronize(self) -> None:
        """Block the host until the device has done all its work."""
        for block in self._blocks.values():
            for access in block.accesses:
                join(self.host, {access.stream: access.time})

    def wait_for_current(self) -> None:
        """Make the host wait for the current stream, as reading a number of the device does."""
        join(self.host, self.current_stream().clock)

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give a storage memory of the current stream's pool, or with 0 bytes give its memory back to its pool."""
        with self._lock:
            if storage.nbytes():
                self._give_back(storage.data_ptr(), where())
            storage.resize_(nbytes)
            if nbytes:
                self._allocate(storage, False, False)

    # -- memory -----------------------------------------------------------------------------------------------------

    def _allocate(self, storage: torch.UntypedStorage, on_host: bool, pinned: bool) -> Block:
        home = self.current_stream()
        block = Block(storage.data_ptr(), storage.nbytes(), home, on_host, pinned)
        self._blocks[block.address] = block
        if not on_host:
            time = self._tick(home)
            what = f"the allocation at {where()}"
            block.accesses.append(Access(home.number, home.name, time, True, 0, block.nbytes, what))
            self.pools.add(home.name, block.nbytes)
        return block

    def born(self, storage: torch.UntypedStorage, on_host: bool, pinned: bool) -> None:
        """A tensor was made on new memory, which ends with its storage."""
        if storage.nbytes():
            block = self._allocate(storage, on_host, pinned)
            self._finalizers.append(weakref.finalize(storage, self._died, block))
            if len(self._finalizers) > 4096:
                self._finalizers = [pending for pending in self._finalizers if pending.alive]

    def _died(self, block: Block) -> None:
        if self._blocks.get(block.address) is block:
            try:
                self._give_back(block.address, "the end of its last tensor")
            except RaceError as error:
                self._late.append(error)

    def _give_back(self, address: int, where: str) -> None:
        block = self._blocks.pop(address, None)
        if block is None or block.on_host:
            return
        self.pools.add(block.home.name, -block.nbytes)
        known = {**block.home.clock}
        join(known, self.host)
        for access in block.accesses:
            if known.get(access.stream, 0) < access.time:
                raise RaceError(
                    f"{block.nbytes} bytes of {block.home.name} are given back at {where} before the last {access} "
                    "is known there to have completed"
                )

    def all_on_host(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the host can read them without asking the device."""
        blocks = [self.block_of(tensor.untyped_storage()) for tensor in tensors]
        return all(block is None or block.on_host for block in blocks)

    def block_of(self, storage: torch.UntypedStorage) -> Block | None:
        """The memory that a storage holds; None: it holds none."""
        if not storage.nbytes():
            return None
        block = self._blocks.get(storage.data_ptr())
        if block is None or block.nbytes != storage.nbytes():  # from before, or from an op that was not seen
            block = Block(storage.data_ptr(), storage.nbytes(), self._default, False, False)
            self._blocks[block.address] = block
        return block

    # -- accesses ---------------------------------------------------------------------------------------------------

    def _tick(self, stream: SimulatedStream) -> int:
        join(stream.clock, self.host)
        time = stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        return time

    def run(
        self, op: str, reads: Sequence[Tensor], writes: Sequence[Tensor], waits: bool, to_device: bool = False
    ) -> None:
        """Check one op's accesses.

        `waits`: the host waits for it where it uses memory of both; `to_device`: it copies to new memory of the device.
        """
        with self._lock:
            accesses = [(t, False) for t in reads] + [(t, True) for t in writes]
            known = [(t, w, block) for t, w in accesses if (block := self.block_of(t.untyped_storage()))]
            if not known:
                return
            on_host = [block.on_host for _, _, block in known]
            mixed = any(on_host) and (to_device or not all(on_host))
            waits = waits or any(block.on_host and not block.pinned for _, _, block in known)
            stream = self.current_stream()
            if all(on_host) and not to_device:
                stream = SimulatedStream(_HOST, "the host", self.host)
            what = f"{op} at {where()}"
            time = self._tick(stream)
            for tensor, writing, block in known:
                low, high = bytes_of(tensor)
                if high > low:
                    now = Access(stream.number, stream.name, time, writing, low, high, what)
                    self._access(block, now, stream.clock)
            if mixed and waits:
                join(self.host, stream.clock)

    def _access(self, block: Block, now: Access, clock: Clock) -> None:
        self.accesses += 1
        kept = []
        for before in block.accesses:
            overlap = before.low < now.high and now.low < before.high
            ordered = clock.get(before.stream, 0) >= before.time
            if overlap and not ordered and (before.writes or now.writes):
                raise RaceError(f"{now} has no order after the {before}")
            covered = now.low <= before.low and before.high <= now.high
            if not (covered and ordered and (now.writes or not before.writes)):
                kept.append(before)
        kept.append(now)
        block.accesses = kept


class _Stamp(TorchDispatchMode):
    """Shows every op's accesses to a device."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        without_memory = any(issubclass(kind, FakeTensor) for kind in types)
        if without_memory or func.namespace in ("_c10d_functional", "c10d"):
            return func(*args, **kwargs)  # a collective's group shows what it does, on its stream
        if any(compat.is_wrapper(kind) for kind in types):
            return NotImplemented  # their own ops on local tensors come here
        device, schema = self._device, func._schema
        device.raise_late()
        if func is torch.ops.aten.lift_fresh.default:  # of `torch.tensor`, whose memory no op has made
            device.born(args[0].untyped_storage(), device.device != CPU, False)
        pinned = bool(kwargs.get("pin_memory"))
        if pinned:
            kwargs = {**kwargs, "pin_memory": False}
        reads, writes, non_blocking = operands(func, args, kwargs)
        if schema.name in SYNCS and not device.all_on_host(reads):
            device.wait_for_current()
        kinds = [r.alias_info for r in schema.returns]
        is_view = bool(kinds) and all(kind and not kind.is_write for kind in kinds)
        # Whether the device was asked for, where its name is not the CPU's.
        to_device = device.device != CPU and kwargs.get("device") == device.device
        if not is_view and func.namespace == "aten" and not makes_room(func):
            device.run(str(func), reads, writes, not non_blocking, to_device)
        result = func(*args, **kwargs)
        if not is_view:
            self._see_results(func, result, reads + writes, pinned, to_device)
        return result

    def _see_results(
        self, func: Any, result: Any, arguments: list[Tensor], pinned: bool, to_device: bool
    ) -> None:
        device = self._device
        known = {t.untyped_storage().data_ptr() for t in arguments}
        blocks = [device.block_of(t.untyped_storage()) for t in arguments]
        all_on_host = any(blocks) and all(block.on_host for block in blocks if block)
        on_host = pinned or (all_on_host and not to_device)
        made = []
        for tensor in tensors_in(result):
            if tensor.untyped_storage().data_ptr() not in known:
                known.add(tensor.untyped_storage().data_ptr())
                device.born(tensor.untyped_storage(), on_host, pinned)
                made.append(tensor)
        if made and not makes_room(func):
            device.run(f"{func}'s result", (), made, False)
