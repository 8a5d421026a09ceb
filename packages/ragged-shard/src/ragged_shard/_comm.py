"""The collectives that layouts need, on flat tensors, each started at once and finished later.

A `Pending` is a started transfer: `wait()` finishes it and gives the tensor. Buffers stay referenced until then.
Moves are blind to the dtype (bytes travel); reductions are not.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ragged_shard._torch_compat import all_gather_into, reduce_scatter_from

# What gloo and NCCL both move by themselves; anything else travels as bytes.
_MOVABLE = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    }
)


class Pending:
    """A transfer under way. `wait()` may be called any number of times."""

    __slots__ = ("_finish", "_result")

    def __init__(self, finish: Callable[[], torch.Tensor]) -> None:
        self._finish: Callable[[], torch.Tensor] | None = finish
        self._result: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """The tensor, once it is there."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        assert self._result is not None
        return self._result


def done(result: torch.Tensor) -> Pending:
    """A transfer that needed none."""
    return Pending(lambda: result)


def _as_movable(flat: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The same storage in a dtype that can travel, and how many of those make up one element."""
    if flat.dtype in _MOVABLE:
        return flat, 1
    return flat.view(torch.uint8), flat.element_size()


def all_to_all(
    send: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], group: dist.ProcessGroup
) -> Pending:
    """Exchange runs of a flat tensor: entry r of the counts goes to, or comes from, rank r of the group.

    One ``all_to_all_single``; this rank sends ``sum(send_counts) - send_counts[own]`` elements to others.
    """
    received = send.new_empty(sum(recv_counts))
    source, factor = _as_movable(send)
    target, _ = _as_movable(received)
    work = dist.all_to_all_single(
        target,
        source,
        [count * factor for count in recv_counts],
        [count * factor for count in send_counts],
        group=group,
        async_op=True,
    )
    return _after(work, received, source)


def all_gather(shard: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Concatenate equal flat shards on every rank: one all-gather."""
    gathered = shard.new_empty(shard.numel() * group.size())
    work = all_gather_into(_as_movable(gathered)[0], _as_movable(shard)[0], group)
    return _after(work, gathered, shard)


def broadcast(flat: torch.Tensor, source: int, group: dist.ProcessGroup) -> Pending:
    """Give ``flat`` of the group's rank ``source`` to all, in place: one broadcast."""
    work = dist.broadcast(_as_movable(flat)[0], group=group, async_op=True, group_src=source)
    return _after(work, flat)


def reduce_scatter(whole: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """The sum over ranks of this rank's equal share of a flat tensor: one reduce-scatter."""
    share = whole.new_empty(whole.numel() // group.size())
    return _after(reduce_scatter_from(share, whole, dist.ReduceOp.SUM, group), share, whole)


def all_reduce(values: torch.Tensor, op: Any, group: dist.ProcessGroup) -> torch.Tensor:
    """Reduce ``values`` over the group in place; returns it. One all-reduce."""
    dist.all_reduce(values, op=op, group=group)
    return values


def _after(work: Any, result: torch.Tensor, *keep: torch.Tensor) -> Pending:
    def finish(keep: tuple[torch.Tensor, ...] = keep) -> torch.Tensor:
        work.wait()
        return result

    return Pending(finish)


def agree(
    problem: str | None, fingerprint: int, group: dist.ProcessGroup, device: torch.device
) -> str | None:
    """Whether all ranks of a group are well and mean the same; else what is wrong, in words, on every rank.

    One all-reduce of three int64. ``problem`` is what this rank found wrong with its own arguments.
    """
    mark = torch.tensor(
        [0 if problem is None else 1, fingerprint, -fingerprint], dtype=torch.int64, device=device
    )
    dist.all_reduce(mark, op=dist.ReduceOp.MAX, group=group)
    bad, highest, lowest = mark.tolist()
    if problem is not None:
        return problem
    if bad:
        return "another rank of the mesh was given arguments that do not fit; its own error says which"
    if highest != -lowest:
        return "the ranks of the mesh were given different shapes, dtypes or placements"
    return None
