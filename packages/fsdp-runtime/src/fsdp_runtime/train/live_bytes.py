"""Live bytes of operations on tensors with or without memory."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
