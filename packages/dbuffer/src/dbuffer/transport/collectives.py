"""torch.distributed's own collectives, one coalesced call whatever the number of tensors."""

import weakref
from typing import Literal

import torch
import torch.distributed as dist

from .. import _torch_compat as compat
from .protocol import Op, Pairs, Work, living

_OPS = {"avg": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Collectives:
    """The transport that every process group has."""

    name = "collectives"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)  # the registry of transports must not keep groups alive

    def all_gather(self, pairs: Pairs, label: str) -> Work:
        """One all-gather."""
        if (len(pairs) > 1 or pairs[0][1].dtype.itemsize == 1) and _needs_bytes(pairs):
            pairs = [(receive.view(torch.uint8), send.view(torch.uint8)) for receive, send in pairs]
        work: Work = compat.all_gather(pairs, living(self._group))
        return work

    def reduce_scatter(self, pairs: Pairs, op: Op, label: str) -> Work:
        """One reduce-scatter."""
        work: Work = compat.reduce_scatter(pairs, _OPS[op], living(self._group))
        return work

    def all_to_all(self, receive: torch.Tensor, send: torch.Tensor, label: str) -> Work:
        """One all-to-all."""
        work: Work = compat.all_to_all(receive, send, living(self._group))
        return work

    def all_reduce(self, tensors: list[torch.Tensor], op: Op | Literal["max"], label: str) -> Work:
        """One all-reduce."""
        work: Work = compat.all_reduce(tensors, _OPS[op], living(self._group))
        return work


def _needs_bytes(pairs: Pairs) -> bool:
    """Whether to gather bytes, which is right on every backend.

    gloo does not know one-byte floats, and flattens coalesced tensors, which garbles several dtypes without an error.
    """
    dtypes = {send.dtype for _, send in pairs}
    return len(dtypes) > 1 or any(dtype.is_floating_point and dtype.itemsize == 1 for dtype in dtypes)
