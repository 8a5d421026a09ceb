"""Live bytes: of operations on tensors with or without memory, and of a step of a run.

Both count every storage from its allocation to its free, rounded by no allocator: live bytes.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ragged_shard import is_cpu

from .._torch.tree import local_tensor, tensors_in


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make inside it, until they are freed, also of fake and meta tensors.

    Attributes:
        peak: the most bytes, with those of `pool`, looked at after every operation.
    """

    def __init__(self, pool: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self.pool = pool
        self.peak = 0
        self._storages = _Storages()

    @property
    def now(self) -> int:
        """Bytes at the moment."""
        return self._storages.nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = {local_tensor(value).untyped_storage()._cdata for value in tensors_in((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for value in tensors_in(out):
            storage = local_tensor(value).untyped_storage()
            if storage._cdata not in arguments:  # else a view, or written in place
                self._count(storage)
        self.peak = max(self.peak, self.now + self.pool())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._storages.sizes or not nbytes:
            return
        self._storages.sizes[key] = nbytes
        self._storages.nbytes += nbytes
        # Python keeps finalizers and what they refer to until they have run: so no method of this object, whose `pool`
        # may refer to the model.
        weakref.finalize(storage, self._storages.forget, key).atexit = False


class _Storages:
    """Those that live, by identity."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.nbytes = 0

    def forget(self, key: int) -> None:
        self.nbytes -= self.sizes.pop(key, 0)


class StepMeter:
    """The peak of live bytes during one step of a run: of the accelerator's allocator, or of tensors on CPU.

    On CPU: `resident` when the step begins, the storages that operations make until they are freed, and `pool`.
    Memory that gloo allocates inside a collective is not seen.

    Args:
        device: whose memory.
        pool: bytes of buffers that come and go without an operation (a runtime's gathered buffers).
        resident: on CPU, bytes that are live before a step. Defaults to those of all tensors in the process, less
            those that were live when the meter was made.
    """

    def __init__(
        self, device: torch.device, pool: Callable[[], int], resident: Callable[[], int] | None = None
    ) -> None:
        self.device, self.pool = device, pool
        others = bytes_of_all_tensors() if resident is None and is_cpu(device) else 0
        self._resident = resident or (lambda: bytes_of_all_tensors() - others)
        self.peak: int | None = None
        self.rest: int | None = None  # live bytes when the step began

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure what happens inside."""
        self.peak = None
        if not is_cpu(self.device):
            torch.accelerator.synchronize(self.device)
            torch.accelerator.reset_peak_memory_stats(self.device)
            self.rest = torch.accelerator.memory_allocated(self.device)
            yield
            torch.accelerator.synchronize(self.device)
            self.peak = torch.accelerator.max_memory_allocated(self.device)
            return
        resident = self._resident()
        self.rest = resident + self.pool()
        with LiveBytes(self.pool) as live:
            yield
        self.peak = resident + max(live.peak, self.pool())


def bytes_of_all_tensors() -> int:
    """Bytes of the storages of all tensors that Python knows in this process, each once."""
    gc.collect()  # what an earlier run in this process left in cycles is not this one's
    sizes: dict[int, int] = {}
    for item in gc.get_objects():
        kind = type(item)
        if issubclass(kind, torch.Tensor) and not hasattr(kind, "to_local") and item.layout == torch.strided:
            storage = item.untyped_storage()
            if _has_memory(storage):
                sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def _has_memory(storage: torch.UntypedStorage) -> bool:
    try:
        return storage.device.type != "meta" and storage.data_ptr() != 0
    except RuntimeError:  # of a fake tensor, which torch.compile keeps
        return False
