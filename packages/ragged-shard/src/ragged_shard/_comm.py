"""The collectives of this package, on flat tensors. Each starts at once and returns a `Pending` to wait for.

A `Pending` keeps its buffers referenced until `wait()`. What only moves data works for any dtype (bytes travel);
reductions do not. CPU tensors travel as copies on the accelerator where a group moves no CPU tensors.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ragged_shard._torch_compat import all_gather_into, reduce_scatter_from
from ragged_shard.dist import movable

# Dtypes that both gloo and NCCL can move; any other travels as bytes.
_MOVABLE = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
}  # fmt: skip


class Pending:
    """A started transfer. `wait()` may be called any number of times."""

    __slots__ = ("_finish", "_result")

    def __init__(self, finish: Callable[[], torch.Tensor]) -> None:
        self._finish: Callable[[], torch.Tensor] | None = finish
        self._result: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """The received tensor; blocks until it is complete (on a GPU: makes the current stream wait)."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        assert self._result is not None
        return self._result


def done(result: torch.Tensor) -> Pending:
    """A result that needed no transfer."""
    return Pending(lambda: result)


def _as_movable(flat: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The same storage in a dtype that backends can move, and how many of its elements make up one original element."""
    if flat.dtype in _MOVABLE:
        return flat, 1
    return flat.view(torch.uint8), flat.element_size()


def all_to_all(
    send: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], group: dist.ProcessGroup
) -> Pending:
    """Send runs of a flat tensor to all ranks: entry r of the counts goes to, or comes from, rank r of the group.

    One ``all_to_all_single``; this rank sends ``sum(send_counts) - send_counts[own rank]`` elements to others.
    """
    device, send = send.device, movable(send, group)
    received = send.new_empty(sum(recv_counts))
    source, factor = _as_movable(send)
    target, _ = _as_movable(received)
    to_receive = [count * factor for count in recv_counts]
    to_send = [count * factor for count in send_counts]
    work = dist.all_to_all_single(target, source, to_receive, to_send, group=group, async_op=True)
    return _after(work, received, device, source)


def all_gather(shard: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Concatenate the ranks' flat tensors, all of one size, on every rank: one all-gather."""
    device, shard = shard.device, movable(shard, group)
    gathered = shard.new_empty(shard.numel() * group.size())
    work = all_gather_into(_as_movable(gathered)[0], _as_movable(shard)[0], group)
    return _after(work, gathered, device, shard)


def broadcast(flat: torch.Tensor, source: int, group: dist.ProcessGroup) -> Pending:
    """Overwrite ``flat`` on all ranks with the values of the group's rank ``source``: one broadcast."""
    moved = movable(flat, group)
    work = dist.broadcast(_as_movable(moved)[0], group=group, async_op=True, group_src=source)

    def finish() -> torch.Tensor:
        work.wait()
        return flat if moved is flat else flat.copy_(moved)

    return Pending(finish)


def reduce_scatter(summand: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """This rank's equal share of the sum of the ranks' flat tensors: one reduce-scatter."""
    device, summand = summand.device, movable(summand, group)
    share = summand.new_empty(summand.numel() // group.size())
    return _after(reduce_scatter_from(share, summand, dist.ReduceOp.SUM, group), share, device, summand)


def all_reduce(values: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> torch.Tensor:
    """Reduce ``values`` over the group in place; returns it. One all-reduce."""
    moved = movable(values, group)
    dist.all_reduce(moved, op=op, group=group)
    return values if moved is values else values.copy_(moved)


def _after(work: dist.Work, result: torch.Tensor, device: torch.device, *keep: torch.Tensor) -> Pending:
    def finish(keep: tuple[torch.Tensor, ...] = keep) -> torch.Tensor:
        work.wait()
        return result.to(device)

    return Pending(finish)
