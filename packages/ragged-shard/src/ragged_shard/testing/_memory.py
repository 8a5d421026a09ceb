"""Count the bytes of tensors that are alive, where they are made."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ragged_shard._torch_compat import is_wrapper


class LiveBytes:
    """Memory of storages that ops made inside a `record_memory` block.

    Attributes:
        now: bytes that are alive.
        peak: the most that were, at any time.
    """

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._known: set[int] = set()

    def note(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or tensor.is_meta:
            return
        self._known.add(key)
        nbytes = storage.nbytes()
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, nbytes).atexit = False

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


class _Mode(TorchDispatchMode):
    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self._live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_wrapper(kind) for kind in types):
            return NotImplemented  # the subclass runs first; its ops come back here
        before = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if type(tensor) is torch.Tensor and tensor.untyped_storage()._cdata not in before:
                self._live.note(tensor)
        return out


@contextmanager
def record_memory() -> Iterator[LiveBytes]:
    """Yields the `LiveBytes` of this thread's new tensors, except resized storages."""
    live = LiveBytes()
    with _Mode(live):
        yield live
