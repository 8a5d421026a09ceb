"""Find host synchronizations without a GPU: some tensors stand for a device's memory, and results
computed from them are on the device too.

    op on device memory                                               what a device does
    ----------------------------------------------------------------  ------------------------------------------
    item, bool, int, float, tolist, numpy, cpu, equal, allclose       the host waits for all that is queued
    nonzero, unique, masked_select, a mask as an index, bincount      the result's shape must be known: it waits
    eigh, svd, solve, inverse, Cholesky without _ex                   their error codes are read: it waits
    copy_ from host memory that is not pinned, torch.tensor(.., dev)  the host waits for the copy
"""

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ragged_shard import RaggedDTensor

_WAITS = {
    "_local_scalar_dense", "equal", "is_nonzero", "allclose", "nonzero", "nonzero_static", "masked_select", "bincount",
    "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "repeat_interleave",
    "_linalg_eigh", "_linalg_svd", "_linalg_check_errors", "linalg_eig",
}  # fmt: skip
_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.cpu}
_WRAPPERS = (DTensor, RaggedDTensor)


class HostWaits:
    """The waits: a line for each, with the op and its caller.

    Attributes:
        lines: the lines, in order.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        # Kind of each storage, by address; with the storage, so that no address comes twice.
        self._memory: dict[int, tuple[str, torch.UntypedStorage]] = {}

    def put(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Let tensors, and all that shares their memory, be of a kind: "device", "pinned" (it stays), or "host"."""
        for tensor in tensors:
            storage = _plain(tensor).untyped_storage()
            known = self._memory.get(storage.data_ptr())
            if known is None or known[0] != "pinned":
                self._memory[storage.data_ptr()] = kind, storage

    def is_of(self, kind: str, tensor: object) -> bool:
        """Whether a tensor's memory is of that kind; host memory is known where it was made from numbers."""
        if not isinstance(tensor, torch.Tensor):
            return False
        pointer = _plain(tensor).untyped_storage().data_ptr()
        return pointer != 0 and pointer in self._memory and self._memory[pointer][0] == kind

    def note(self, what: str) -> None:
        """Write down a wait."""
        frames = [
            f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__
        ]
        file = frames[-1].filename.rpartition("/")[2]
        self.lines.append(f"{what} in {frames[-1].name} ({file}:{frames[-1].lineno})")


class _Ops(TorchDispatchMode):
    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, _WRAPPERS) for kind in types):
            return NotImplemented  # its own ops come here
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        waits, name = self._waits, func.overloadpacket.__name__
        on_device = any(waits.is_of("device", t) for t in tensors)
        if on_device:
            if name in _WAITS or _has_mask(name, args):
                waits.note(name)
            if name in ("copy_", "_foreach_copy_") and any(waits.is_of("host", t) for t in tensors):
                waits.note("a pageable copy")
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        if (kwargs or {}).get("pin_memory"):
            waits.put("pinned", made)
        elif on_device:
            written = tree_leaves(args[0]) if name.endswith("_") and args else []
            waits.put("device", [*made, *(t for t in written if isinstance(t, torch.Tensor))])
            waits.put("device", [t for t in tree_leaves((kwargs or {}).get("out")) if t is not None])
        elif name == "lift_fresh":
            waits.put("host", made)
        return out


class _Methods(TorchFunctionMode):
    """Methods that read a CPU tensor without an op."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and self._waits.is_of("device", args[0]):
            self._waits.note(func.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def host_waits(on_device: Iterable[torch.Tensor]) -> Iterator[HostWaits]:
    """Record where the host would wait for a device in whose memory these tensors and all that comes of them are.

    Sees the ops of the calling thread, and of autograd for it.

    Args:
        on_device: tensors that stand for the device's memory: parameters, inputs, states.
    """
    waits = HostWaits()
    waits.put("device", on_device)
    with _Methods(waits), _Ops(waits):
        yield waits


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, _WRAPPERS) else tensor


def _has_mask(name: str, args: Any) -> bool:
    if name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    return any(isinstance(t, torch.Tensor) and t.dtype in (torch.bool, torch.uint8) for t in args[1])
