"""torch.distributed's own collectives, on NCCL and gloo one coalesced call for any number of tensors.

On a GPU they run on the stream that is current when they start, with its priority, as FSDP2's do. On a CPU, and with
gloo, there is no such stream: they are asynchronous.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from ragged_shard.device import device_layer

from .. import _torch_compat as compat
from .protocol import Op, Pairs, Work

_OPS = {"avg": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Coalesced:
    """The work of several collectives that were started together."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self.works = works  # torch's

    def wait(self) -> None:
        """Block until all have completed, or one has failed."""
        for work in self.works:
            work.wait()

    def wait_for(self, seconds: float) -> bool:
        """Block as `wait`, at most so long for each. Returns whether all have completed."""
        return all(compat.wait_for(work, seconds) for work in self.works)

    def is_completed(self) -> bool:
        """Whether all have completed."""
        return all(work.is_completed() for work in self.works)


class Collectives:
    """The transport that every process group has."""

    name = "collectives"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)  # the registry of transports must not keep groups alive
        self._known: dict[torch.device, tuple[bool, bool]] = {}  # by device: queued, coalesces

    def all_gather(self, pairs: Pairs, label: str) -> Work | None:
        """One all-gather."""
        if (len(pairs) > 1 or pairs[0][1].dtype.itemsize == 1) and _needs_bytes(pairs):
            pairs = [(receive.view(torch.uint8), send.view(torch.uint8)) for receive, send in pairs]
        return self._start(compat.all_gather, pairs)

    def reduce_scatter(self, pairs: Pairs, op: Op, label: str) -> Work | None:
        """One reduce-scatter."""
        return self._start(compat.reduce_scatter, pairs, op=_OPS[op])

    def all_to_all(self, receive: torch.Tensor, send: torch.Tensor, label: str) -> Work | None:
        """One all-to-all."""
        return self._start(dist.all_to_all_single, [(receive, send)])

    def all_reduce(self, tensors: list[torch.Tensor], op: Op | Literal["max"], label: str) -> Work | None:
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
    ) -> Work | None:
        group = self.group()
        device = calls[0][0].device
        if device not in self._known:
            self._known[device] = self._is_queued(group, device), compat.coalesces(group, device)
        queued, coalesces = self._known[device]
        asynchronous = not queued
        if len(calls) == 1:
            work: Work | None = call(*calls[0], group=group, async_op=asynchronous, **options)
            return work
        if not coalesces:
            started = [call(*tensors, group=group, async_op=asynchronous, **options) for tensors in calls]
            return Coalesced(started) if asynchronous else None
        with compat.coalescing(group=group, async_ops=asynchronous) as works:
            for tensors in calls:
                call(*tensors, group=group, async_op=asynchronous, **options)
        return Coalesced(works.works) if asynchronous else None

    def _is_queued(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        """Whether there is nothing to wait for: calls are queued on the current stream, or move nothing."""
        if compat.is_fake(group):
            return True
        return device_layer(device).asynchronous and not compat.is_gloo(group, device)


def _needs_bytes(pairs: Pairs) -> bool:
    """Whether to gather bytes, which is right on every backend.

    gloo does not know one-byte floats, and flattens coalesced tensors, which garbles several dtypes without an error.
    """
    dtypes = {send.dtype for _, send in pairs}
    return len(dtypes) > 1 or any(dtype.is_floating_point and dtype.itemsize == 1 for dtype in dtypes)
