"""Memory that goes from one gathered buffer to the next of equal size.

    lend(storage, n)         parked block of n bytes, if there is one  -> storage      (else a new block)
    take_back(storage)       storage -> parked, with an event of its last use; the storage is empty

A storage object stays the same while the memory in it comes and goes, so tensors that view it, also those that
autograd has saved, are valid again as soon as memory is back. On torch releases that cannot exchange memory
between storages (see `_torch_compat`) blocks go back to torch's own allocator, which on CUDA caches them too.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from . import _torch_compat as compat
from ._device import device_layer

_ALIGNMENT = 16  # bytes; below it NCCL falls back to copies of single elements


@dataclass(frozen=True)
class RecyclerStats:
    """What a recycler holds and did.

    Attributes:
        lent_bytes: in storages now.
        parked_bytes: kept for the next one to ask.
        peak_bytes: the most that lent and parked were together.
        allocations: how often memory came from torch's allocator.
        reuses: how often a parked block was handed back.
    """

    lent_bytes: int
    parked_bytes: int
    peak_bytes: int
    allocations: int
    reuses: int


def check_aligned(address: int) -> None:
    """Raise RuntimeError where memory from torch's allocator is off a 16-byte boundary."""
    if address % _ALIGNMENT:
        raise RuntimeError(f"torch's allocator returned memory at {address:#x}, not a multiple of 16 bytes")


@dataclass(frozen=True)
class _Block:
    storage: torch.UntypedStorage
    last_use: Any  # event
    home: Any  # the stream that the allocator gave it to


class Recycler:
    """Keeps blocks of released buffers and hands them to buffers of exactly the same size.

    On CUDA a block that comes back carries an event; who gets it next waits for that event on its own stream, and
    a block that goes back to torch's allocator first makes the stream it came from wait. So its last use is
    always over.

    Args:
        device: where the blocks are.
        keep_bytes: park at most so many bytes; the longest parked go back to the allocator first. None: no limit,
            so that a repeated step allocates nothing. 0: keep nothing.
        lean: where no parked block fits, give all of them back before asking the allocator, so that there is never
            more memory than was lent at once; a repeated step may then allocate anew.
    """

    def __init__(
        self, device: torch.device | str, *, keep_bytes: int | None = None, lean: bool = False
    ) -> None:
        if keep_bytes is not None and keep_bytes < 0:
            raise ValueError(f"keep_bytes is {keep_bytes}; expected None or at least 0")
        self._layer = device_layer(device)
        self._keep = keep_bytes
        self._lean = lean
        self._parked: list[_Block] = []  # the longest parked first
        self._homes: weakref.WeakKeyDictionary[torch.UntypedStorage, Any] = weakref.WeakKeyDictionary()
        self._spare: list[torch.UntypedStorage] = []  # empty storage objects, to park blocks in
        self._parked_bytes = self._peak = self._allocations = self._reuses = 0

    @property
    def device(self) -> torch.device:
        """Where the blocks are, with index."""
        return self._layer.device

    @property
    def stats(self) -> RecyclerStats:
        """The figures by now."""
        return RecyclerStats(self._lent(), self._parked_bytes, self._peak, self._allocations, self._reuses)

    def _lent(self) -> int:
        # Asked of the storages themselves, so that those which died while lent do not count.
        return sum(storage.nbytes() for storage in self._homes)

    def lend(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Fill an empty storage with `nbytes` of uninitialised memory, safe to use on the current stream."""
        assert storage.nbytes() == 0
        block = self._pop_parked(nbytes)
        if block is not None:
            self._layer.wait(block.last_use)
            compat.swap_memory(storage, block.storage)
            self._spare.append(block.storage)
            self._homes[storage] = block.home
            self._reuses += 1
            return
        if self._lean:
            self.trim()
        storage.resize_(nbytes)
        check_aligned(storage.data_ptr())
        self._homes[storage] = self._layer.current_stream()
        self._allocations += 1
        self._peak = max(self._peak, self._lent() + self._parked_bytes)

    def take_back(self, storage: torch.UntypedStorage) -> None:
        """Leave the storage empty. The current stream must be behind the last use of its memory."""
        nbytes, home = storage.nbytes(), self._homes.pop(storage)
        last_use = self._layer.record()
        if not compat.CAN_SWAP or self._keep == 0:
            self._layer.wait(last_use, home)
            storage.resize_(0)
            return
        holder = self._spare.pop() if self._spare else torch.UntypedStorage(0, device=self.device)
        compat.swap_memory(storage, holder)
        self._parked.append(_Block(holder, last_use, home))
        self._parked_bytes += nbytes
        if self._keep is not None:
            self.trim(self._keep)

    def trim(self, keep_bytes: int = 0) -> None:
        """Give parked blocks back to torch's allocator, the longest parked first, until `keep_bytes` are left."""
        while self._parked_bytes > keep_bytes:
            block = self._parked.pop(0)
            self._parked_bytes -= block.storage.nbytes()
            self._layer.wait(block.last_use, block.home)
            block.storage.resize_(0)
            self._spare.append(block.storage)

    def _pop_parked(self, nbytes: int) -> _Block | None:
        for index in reversed(range(len(self._parked))):  # the latest: the likeliest to be in a cache
            if self._parked[index].storage.nbytes() == nbytes:
                self._parked_bytes -= nbytes
                return self._parked.pop(index)
        return None


_shared: dict[torch.device, Recycler] = {}


def shared_recycler(device: torch.device | str) -> Recycler:
    """This process's recycler for a device: the one that buffers use unless they are given another."""
    device = device_layer(device).device
    return _shared.setdefault(device, Recycler(device))
