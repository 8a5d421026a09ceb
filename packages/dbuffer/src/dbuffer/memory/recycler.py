"""The memory of buffers: shards have their own, gathered memory comes and goes.

A storage object stays the same while the memory in it comes and goes, so tensors that view it, also tensors that
autograd has saved, are valid again as soon as memory is back.

On a device each block has a home: the stream that was current when it was allocated, and in whose pool of torch's
caching allocator it is free again. It is given back there, after the home has waited for the stream that used it last.
A pass finds the same blocks again, since the same stream asks for the same sizes.

On the host blocks that are given back are parked for the next buffer of exactly the same size: pages that the kernel
got back would have to be filled with zeros again. On torch releases that cannot exchange memory between storages (see
`_torch_compat`) they go back to torch's allocator. Large blocks of buffers whose ranks may read each other's memory
are from a `HostArena`. Memory that a failed collective may still write is kept for good (`quarantine`).
"""

import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch

from ragged_shard.device import DeviceLayer, device_layer

from .. import _torch_compat as compat
from .geometry import ALIGNMENT, Geometry
from .huge_pages import SMALLEST, prefer_huge_pages

_NOTHING: Mapping[str, torch.Tensor] = MappingProxyType({})


# Memory that must not be used again, kept until the process ends.
_quarantine: list[object] = []
_recyclers: "weakref.WeakSet[Recycler]" = weakref.WeakSet()  # of this process


@dataclass(frozen=True)
class RecyclerStats:
    """Figures of a recycler.

    Attributes:
        lent_bytes: in storages now.
        parked_bytes: kept for the next buffer that asks.
        peak_bytes: the most that allocated and parked bytes were together.
        allocations: how often memory came from torch's allocator.
        quarantined_bytes: never to be used again, because a collective on them failed.
    """

    lent_bytes: int
    parked_bytes: int
    peak_bytes: int
    allocations: int
    quarantined_bytes: int


def hold_forever(memory: Iterable[object]) -> None:
    """Keep tensors or storages alive until the process ends: a failed collective may still write to them."""
    _quarantine.extend(memory)


def check_aligned(address: int) -> None:
    """Raise RuntimeError if memory from torch's allocator is off a 16-byte boundary."""
    if address % ALIGNMENT:
        raise RuntimeError(
            f"torch's allocator returned memory at {address:#x}, not a multiple of {ALIGNMENT} bytes"
        )


class HostArena(Protocol):
    """Memory on the host that other ranks can read, such as dbuffer's for peer memory."""

    # address, size: where it is, in bytes
    address: int
    size: int
    smallest: int  # bytes of the smallest block worth taking from it

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Uninitialised memory, uint8, given back with its last storage. Raises RuntimeError if there is none."""
        ...

    def trim(self) -> None:
        """Give free memory back to the kernel."""
        ...


class Recycler:
    """Gives memory to the storages of released buffers, and takes it back.

    Attributes:
        device: where the blocks are, with index.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.layer = device_layer(device)
        self.device = self.layer.device
        self._lock = threading.RLock()  # models that are trained in separate threads share this
        self._parked: list[torch.UntypedStorage] = []  # the longest parked first
        # The storages that have memory, and on a device its home.
        self._homes: weakref.WeakKeyDictionary[torch.UntypedStorage, Any] = weakref.WeakKeyDictionary()
        self._spare: list[torch.UntypedStorage] = []  # empty storage objects, to park blocks in
        self._parked_bytes = self._peak = self._allocations = self._quarantined = 0
        self._arena: HostArena | None = None
        _recyclers.add(self)

    def take_from(self, arena: "HostArena") -> None:
        """Take new large blocks from an arena, on torch releases that can exchange memory between storages."""
        if self._arena is None and compat.CAN_SWAP:
            self._arena = arena
            weakref.finalize(self, arena.trim).atexit = False

    @property
    def stats(self) -> RecyclerStats:
        """The figures at this moment."""
        return RecyclerStats(
            self._used(), self._parked_bytes, self._peak, self._allocations, self._quarantined
        )

    def _used(self) -> int:
        # Asked of the storages themselves, so that storages which died while in use do not count.
        with self._lock:
            return sum(map(torch.UntypedStorage.nbytes, self._homes))

    def lends(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage's memory is from here."""
        return storage in self._homes

    def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Fill an empty storage with `nbytes` of uninitialised memory, safe to use on the current stream.

        Raises:
            RuntimeError: the storage is in quarantine, on a torch release that cannot give it other memory.
        """
        with self._lock:
            if storage.nbytes():
                if not compat.CAN_SWAP:
                    raise RuntimeError(
                        f"this storage of {storage.nbytes()} bytes is in quarantine since a collective on it failed, "
                        f"and torch {torch.__version__} cannot give it other memory; build the buffer again"
                    )
                self.quarantine(storage)  # an interrupt kept it from being taken back
            block = self._pop_parked(nbytes)
            if block is not None:
                compat.swap_memory(storage, block)
                self._spare.append(block)
                self._homes[storage] = None
                return
            self.trim()  # so that there is never more memory than was in use at once
            if self._arena is not None and nbytes >= self._arena.smallest:
                compat.swap_memory(storage, self._arena.allocate(nbytes).untyped_storage())
            else:
                self.layer.resize(storage, nbytes)
                if nbytes >= SMALLEST:
                    prefer_huge_pages(storage)
            self._homes[storage] = self.layer.current_stream()
            check_aligned(storage.data_ptr())
            self._allocations += 1
            self._peak = max(self._peak, self._used() + self._parked_bytes)

    def recycle(self, storage: torch.UntypedStorage) -> None:
        """Leave the storage empty. The current stream must be behind the last use of its memory."""
        if self.layer.asynchronous or not compat.CAN_SWAP:
            self.drop(storage)
            return
        with self._lock:
            nbytes, arena = storage.nbytes(), self._arena
            del self._homes[storage]
            if (
                arena is not None
                and nbytes >= arena.smallest
                and not arena.address <= storage.data_ptr() < arena.address + arena.size
            ):
                self._empty(storage)  # from before `take_from`, or shared by torch: not to be used again
                return
            holder = self._spare.pop() if self._spare else torch.UntypedStorage(0, device=self.device)
            compat.swap_memory(storage, holder)
            self._park(holder, nbytes)

    def drop(self, storage: torch.UntypedStorage) -> None:
        """Leave the storage empty, and give its memory back to torch's allocator instead of parking it."""
        with self._lock:
            home = self._homes.pop(storage)
            with self.layer.on(home, (self.layer.record(),)):
                self._empty(storage)

    def _empty(self, storage: torch.UntypedStorage) -> None:
        """Give a storage's memory back to its allocator, on the current stream."""
        if storage.resizable():
            self.layer.resize(storage, 0)
        else:  # memory of an arena
            compat.swap_memory(storage, torch.UntypedStorage(0))

    def quarantine(self, storage: torch.UntypedStorage) -> None:
        """Leave the storage empty and keep its memory until the process ends: something may still write there."""
        with self._lock:
            self._homes.pop(storage, None)
            self._quarantined += storage.nbytes()
            holder = storage
            if compat.CAN_SWAP:
                holder = torch.UntypedStorage(0, device=self.device)
                compat.swap_memory(storage, holder)
            _quarantine.append(holder)

    def trim(self) -> None:
        """Give all parked blocks back to torch's allocator."""
        with self._lock:
            parked, self._parked, self._parked_bytes = self._parked, [], 0
            for block in parked:
                self._give_back(block)

    def _park(self, block: torch.UntypedStorage, nbytes: int) -> None:
        self._parked.append(block)
        self._parked_bytes += nbytes

    def _give_back(self, block: torch.UntypedStorage) -> None:
        self._empty(block)
        self._spare.append(block)

    def _pop_parked(self, nbytes: int) -> torch.UntypedStorage | None:
        for index in reversed(range(len(self._parked))):  # the latest: the likeliest to be in a cache
            if self._parked[index].nbytes() == nbytes:
                self._parked_bytes -= nbytes
                return self._parked.pop(index)
        return None


class Recycled:
    """Storages that get memory from a recycler and return it; tensors on them stay the same objects."""

    def __init__(self, recycler: Recycler) -> None:
        self._recycler = recycler
        self._storages: list[tuple[torch.UntypedStorage, int]] = []  # and their bytes
        self.present = False  # whether there is memory
        self._keeps = self._kept = False  # whether `release` keeps the memory, and has
        self._last_use: Any = None  # of the kept memory

    def materialize(self) -> None:
        """Allocate uninitialised memory, all or none, for use on the current stream. No effect if there is memory."""
        if self.present:
            return
        if self._kept:
            self._recycler.layer.wait(self._last_use)
        else:
            try:
                for storage, nbytes in self._storages:
                    self._recycler.allocate(storage, nbytes)
            except BaseException:
                for storage, _ in self._storages:
                    if self._recycler.lends(storage):
                        self._recycler.recycle(storage)
                raise
        self.present, self._kept = True, False

    def release(self) -> None:
        """Free the memory. On CUDA call it on the stream of the last use."""
        if self.present:
            self.present = False  # first: after an interrupt nothing reads half-freed memory
            self._kept = self._keeps
            if self._keeps:
                self._last_use = self._recycler.layer.record()
                return
            for storage, _ in self._storages:
                self._recycler.recycle(storage)

    def keep(self, enable: bool) -> None:
        """Let `release` keep the memory for the next `materialize`, at the same addresses."""
        self._keeps = enable
        if self._kept and not enable:
            self.materialize()
            self.release()

    def retire(self) -> None:
        """Free the memory, and never use it again: a collective that failed may still write there."""
        if self.present or self._kept:
            self.present = self._kept = False
            for storage, _ in self._storages:
                self._recycler.quarantine(storage)


class Scratch(Recycled):
    """Memory that collectives use in addition to a buffer's: for encoded and for received bytes.

    Attributes:
        flat: all of it, uint8, 1-D. Without memory while not `present`.
    """

    def __init__(self, recycler: Recycler, nbytes: int) -> None:
        super().__init__(recycler)
        storage = torch.UntypedStorage(0, device=recycler.device)
        self._storages.append((storage, nbytes))
        self.materialize()
        self.flat = torch.empty(0, dtype=torch.uint8, device=recycler.device)
        self.flat.set_(storage, 0, (nbytes,), (1,))
        self.release()


class ShardMemory:
    """This rank's slices and the views into them.

    Args:
        device: where they are.
        pin_memory: page-lock it, for copies to and from a device.
        zeroed: whether it is set to zero.

    Attributes:
        flats: 1-D, `shard_size` elements each, one a segment; empty after `give`.
        views: this rank's slice of each tensor, in its local shape.
        gaps: the runs of `flats` that hold padding.
    """

    def __init__(
        self,
        geometry: Geometry,
        dtype: torch.dtype,
        device: torch.device,
        pin_memory: bool,
        *,
        zeroed: bool = True,
    ) -> None:
        self._geometry = geometry
        self._dtype, self._device, self._pin_memory = dtype, device, pin_memory
        self.flats: tuple[torch.Tensor, ...] = ()
        self.views = _NOTHING
        self.gaps: list[torch.Tensor] = []
        self.allocate(zeroed=zeroed)

    def allocate(self, *, zeroed: bool = False) -> None:
        """Allocate memory, also again after `give`; uninitialised, padding too, unless `zeroed`."""
        geometry = self._geometry
        flats = [self._flat(segment.shard_size, self._dtype, zeroed) for segment in geometry.layout.segments]
        views: dict[str, torch.Tensor] = {}
        for name, part in geometry.slices.items():  # one op a view; in steps too, gradients get new memory
            views[name] = flats[part.segment].as_strided(part.local_shape, part.local_stride, part.begin)
        self.views = MappingProxyType(views)
        if geometry.gaps:
            self.gaps = geometry.gaps_in(flats)
        self.flats = tuple(flats)  # last: an interrupt before leaves no shard, not one without views or gaps

    def _flat(self, numel: int, dtype: torch.dtype, zeroed: bool) -> torch.Tensor:
        flat = torch.empty(numel, dtype=dtype, device=self._device, pin_memory=self._pin_memory)
        if flat.nbytes >= SMALLEST and not self._pin_memory:
            prefer_huge_pages(flat)
        if zeroed:
            flat.zero_()
        check_aligned(flat.data_ptr())
        return flat

    def give(self) -> None:
        """Detach the memory: it belongs to the tensors that still view it, and is freed with the last of them."""
        self.flats, self.views, self.gaps = (), _NOTHING, []


# One for each device, as long as it is used: buffers of all models are recycled together.
_shared: "weakref.WeakValueDictionary[DeviceLayer, Recycler]" = weakref.WeakValueDictionary()


def shared_recycler(device: torch.device | str) -> Recycler:
    """This process's recycler for a device: the one that buffers use unless they are given another."""
    layer = device_layer(device)
    recycler = _shared.get(layer)
    if recycler is None:
        recycler = _shared[layer] = Recycler(layer.device)
    return recycler


def _after_in_child() -> None:
    for recycler in list(_recyclers):
        recycler._lock = threading.RLock()  # another thread of the parent may have held it
        recycler._arena = None  # the child has none of its memory
        recycler._parked, recycler._parked_bytes = [], 0


os.register_at_fork(after_in_child=_after_in_child)
