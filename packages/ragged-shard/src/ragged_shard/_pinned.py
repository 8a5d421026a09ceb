"""Page-locked CPU memory of exactly the bytes asked for, where torch's allocator would round up to a power of two.

pages      an anonymous mapping, registered with the device: page-locked, and copies need not block
tensor     holds a lease of the pages; when its last view is gone, the pages may serve the next tensor
next use   only after the device has done what it had queued when the lease ended: one wait serves all such pages
the end    of the owner and of the lease, in either order: the device has done its work, the pages are unregistered
"""

import logging
import mmap
import os
import weakref

import torch

from ragged_shard._device import CPU, DeviceLayer

_log = logging.getLogger(__name__)
_refused: "weakref.WeakSet[DeviceLayer]" = weakref.WeakSet()  # of these it has been logged


class _Waits:
    """How often the host began to wait for all of a device's work, and which of these waits have ended."""

    def __init__(self) -> None:
        self.begun = self.ended = 0

    def wait(self, layer: DeviceLayer) -> None:
        self.begun += 1
        number = self.begun
        layer.synchronize()
        self.ended = max(self.ended, number)


_waits: "weakref.WeakKeyDictionary[DeviceLayer, _Waits]" = weakref.WeakKeyDictionary()


class _Pages:
    """One registered mapping.

    Attributes:
        leased: whether there is a tensor on it.
    """

    def __init__(self, layer: DeviceLayer, nbytes: int) -> None:
        self._layer, self._mapping = layer, mmap.mmap(-1, nbytes)
        self._waits = _waits.setdefault(layer, _Waits())
        address = torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr()
        layer.register_memory(address, nbytes)
        end = weakref.finalize(self, _unregister, layer, self._waits, address, self._mapping, os.getpid())
        end.atexit = False  # tensors may live until the end of the process, which frees all this
        self.leased = False
        self._returned = -1  # waits that had begun by then are no proof that the device is done

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        if self._waits.ended <= self._returned:
            self._waits.wait(self._layer)
        lease = memoryview(self._mapping)  # which the tensor's storage holds
        weakref.finalize(lease, self._recycle).atexit = False
        self.leased = True
        return torch.frombuffer(lease, dtype=dtype)

    def _recycle(self) -> None:
        self._returned, self.leased = self._waits.begun, False


def _unregister(layer: DeviceLayer, waits: _Waits, address: int, mapping: mmap.mmap, process: int) -> None:
    """The end of pages. `mapping` is an argument so that it outlives the registration."""
    if os.getpid() != process:  # a forked child has no device, and the pages are its parent's
        return
    waits.wait(layer)
    layer.unregister_memory(address)


class PinnedMemory:
    """Page-locked CPU memory for one 1-D tensor at a time.

    Pages are kept from one tensor to the next, since registering takes longer than a copy. Where a device registers
    no memory (any but CUDA and ROCm) or refuses to, which is logged once, tensors come from torch's pinned allocator,
    which on CUDA rounds up to a power of two and keeps what is freed.

    Args:
        layer: of the device that copies.
        numel, dtype: of the tensors.
    """

    def __init__(self, layer: DeviceLayer, numel: int, dtype: torch.dtype) -> None:
        self._layer, self._numel, self._dtype = layer, numel, dtype
        self._registers = layer.registers_memory and numel > 0
        self._pages: _Pages | None = None

    def zeros(self) -> torch.Tensor:
        """A pinned tensor of zeros; see `empty`."""
        return self.empty().zero_()

    def empty(self) -> torch.Tensor:
        """An uninitialised tensor, on the pages of the last one if no view of that is left.

        The host waits for the device then, unless it has done so for other pages since the last view's end.
        """
        if self._registers and (self._pages is None or self._pages.leased):
            self._pages = self._register()
        if self._pages is None:
            return torch.empty(self._numel, dtype=self._dtype, device=CPU, pin_memory=True)
        return self._pages.tensor(self._dtype)

    def _register(self) -> _Pages | None:
        nbytes = self._numel * self._dtype.itemsize
        try:
            return _Pages(self._layer, nbytes)
        except (OSError, RuntimeError) as error:
            self._registers = False
            if self._layer not in _refused:
                _refused.add(self._layer)
                text = (
                    "%s does not register %d bytes of CPU memory (%s); torch's pinned allocator may round up"
                )
                _log.warning(text, self._layer.device, nbytes, error)
            return None
