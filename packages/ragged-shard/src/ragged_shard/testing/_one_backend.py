"""Process groups that move an accelerator's tensors only, as ``init_process_group("nccl")`` makes them, on a CPU.

A copy to the accelerator, which is called "meta" here, stays in CPU memory. That memory counts as the device's from
then on, as do results of such memory alone. A collective of other memory raises what torch raises.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ragged_shard import dist as ranks
from ragged_shard._torch_compat import is_wrapper

_DEVICE = torch.device("meta")


class _Memory(TorchDispatchMode):
    """Follows the device's memory through ops, and refuses collectives of other memory."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[
            int, torch.UntypedStorage
        ] = {}  # of the device; referenced, so that no id is used twice

    def _belongs(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_wrapper, types)):
            return NotImplemented  # the subclass runs first; its local tensors come back here
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        belongs = [*map(self._belongs, tensors)]
        copied = (
            bool(tensors) and kwargs.get("device") == _DEVICE
        )  # `to` of `movable`, the only place that names it
        if func.namespace in ("c10d", "_c10d_functional") and not all(belongs):
            raise RuntimeError("No backend type associated with device type cpu")
        result = args[0].clone() if copied else func(*args, **kwargs)
        if copied or (tensors and all(belongs)):
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    self._storages[storage._cdata] = storage
        return result


@contextmanager
def accelerator_groups() -> Iterator[None]:
    """A context in which this rank's process groups move tensors of an accelerator only, which the CPU stands for."""
    with mock.patch.object(ranks, "_device", return_value=_DEVICE), _Memory():
        yield
