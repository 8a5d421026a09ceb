"""torch.distributed's own collectives, one coalesced call whatever the number of tensors."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from .. import _torch_compat as compat
from .._order import watched
from .protocol import Op, Pairs, Work

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
        return self._start(compat.all_gather, pairs)

    def reduce_scatter(self, pairs: Pairs, op: Op, label: str) -> Work:
        """One reduce-scatter."""
        return self._start(compat.reduce_scatter, pairs, op=_OPS[op])

    def all_to_all(self, receive: torch.Tensor, send: torch.Tensor, label: str) -> Work:
        """One all-to-all."""
        return self._start(dist.all_to_all_single, [(receive, send)])

    def all_reduce(self, tensors: list[torch.Tensor], op: Op | Literal["max"], label: str) -> Work:
        """One all-reduce."""
        return self._start(dist.all_reduce, [(tensor,) for tensor in tensors], op=_OPS[op])

    def group(self) -> dist.ProcessGroup:
        """The process group. torch would take None for the group of all ranks.

        Raises:
            RuntimeError: it was destroyed.
        """
        group = self._group()
        if group is None:
            raise RuntimeError("the process group of this transport is gone")
        return group

    def _start(
        self, call: Callable[..., Any], calls: Sequence[tuple[torch.Tensor, ...]], **options: Any
    ) -> Work:
        group = self.group()
        order = watched.get(group)
        if order is not None and order.unmet is not None:
            order.meet()  # equal sizes would mix values up, others end the process (gloo) or hang (NCCL)
        if len(calls) == 1:
            work: Work = call(*calls[0], group=group, async_op=True, **options)
            return work
        with compat.coalescing(group=group, async_ops=True) as works:
            work = works
            for tensors in calls:
                call(*tensors, group=group, async_op=True, **options)
        return work


def _needs_bytes(pairs: Pairs) -> bool:
    """Whether to gather bytes, which is right on every backend.

    gloo does not know one-byte floats, and flattens coalesced tensors, which garbles several dtypes without an error.
    """
    dtypes = {send.dtype for _, send in pairs}
    return len(dtypes) > 1 or any(dtype.is_floating_point and dtype.itemsize == 1 for dtype in dtypes)
