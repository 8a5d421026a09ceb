"""Runs of parameters that follow one another in a group's memory, gathered without a copy.

    segment, 3 ranks   |   rank 0   |   rank 1   |   rank 2   |
    a run                      [ a ][   b   ]                    rank 0 and rank 1 send their parts of it

The pieces of a run, rank by rank, are its tensors one after the other, so that they arrive where they belong.
"""

import itertools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dbuffer import TensorSlice
from ragged_shard.dist import on_all_ranks

from .. import _torch_compat as compat
from .._params.group import Group
from .._params.unit import Param
from .files import split_by_size


@dataclass(frozen=True)
class Run:
    """Consecutive parameters of one segment of a group."""

    group: Group
    segment: int  # its index
    size: int  # of its elements, how many each rank of the shard axis holds
    members: list[Param]  # in the order of their memory
    dtype: torch.dtype  # in which they are gathered
    # start, stop: elements of the gathered segment
    start: int
    stop: int

    def piece(self, rank: int) -> tuple[int, int]:
        """The elements of the run that a rank of the shard axis holds."""
        low, high = max(self.start, rank * self.size), min(self.stop, (rank + 1) * self.size)
        return low - self.start, max(low, high) - self.start

    def own(self) -> torch.Tensor:
        """This rank's piece, in memory of the shard."""
        rank, buffer = self.group.plan.data.shard_rank, self.group.buffer
        assert buffer is not None
        first, (low, high) = self.start - rank * self.size, self.piece(rank)
        return buffer.shard[self.segment].detach()[first + low : first + high]


def in_order_of_memory(group: Group) -> list[Param]:
    """The parameters of a group."""
    params = {param.key: param for param in group.params}
    return [params[key] for segment in group.plan.layout.segments for key in segment.names]


def runs_of(params: Iterable[tuple[Param, torch.dtype]], most: int) -> Iterator[Run]:
    """Parameters, in the order of memory, in runs of at most `most` bytes; a larger tensor is a separate run.

    Args:
        params: each with the dtype in which it is gathered.
    """
    keys = ((param.group, _place(param).segment, dtype, param) for param, dtype in params)
    for (group, index, dtype), items in itertools.groupby(keys, operator.itemgetter(0, 1, 2)):
        members = [param for *_, param in items]
        begins = [_place(param).offset for param in members]
        ends = [_place(param).offset + _place(param).numel for param in members]
        steps = itertools.pairwise([begins[0], *ends])
        layout, segment = group.plan.layout, group.plan.layout.segments[index]
        for part in split_by_size([(end - begin) * dtype.itemsize for begin, end in steps], most):
            start, stop, size = begins[part[0]], ends[part[-1]], segment.shard_size
            if len(part) == len(segment.names):  # all of it, with the padding: one all-gather
                start, stop = 0, size * layout.world_size
            yield Run(group, index, size, members[part[0] : part[-1] + 1], dtype, start, stop)


def _place(param: Param) -> TensorSlice:
    return param.group.plan.geometry.slices[param.key]


def gather(run: Run, ranks: Iterable[int] | None, problem: Exception | None = None) -> torch.Tensor | None:
    """The elements of a run, in its dtype, on these global ranks (None: on all); None on others.

    One all-gather where the run is all of a segment and everyone receives; else one broadcast from each rank that holds
    some of it, or one all-to-all for each receiver. A receiver gets the bytes that it lacks and no others. Bytes are
    sent, since backends move few dtypes. Where one rank has no memory for them, or passes a problem, all ranks raise.
    """
    data = run.group.plan.data
    group, members = data.groups[-1], dist.get_process_group_ranks(data.groups[-1])
    # Tensors that another parallelism cuts are gathered over its mesh afterwards, by all its ranks.
    cut = any(plan.cut_by_others for plan in run.group.plan.params)
    chosen = set(members if ranks is None or cut else ranks)
    receivers = [index for index, rank in enumerate(members) if rank in chosen]
    to_all, receives = len(receivers) == len(members), data.shard_rank in receivers
    with on_all_ranks(f"gathering {run.members[0].name}", data.groups):
        if problem is not None:
            raise problem
        own = run.own()
        full = torch.empty(run.stop - run.start if receives else 0, dtype=run.dtype, device=data.device)
        own = own if to_all else own.to(data.device, run.dtype)
    pieces, full_bytes = [run.piece(rank) for rank in range(len(members))], full.view(torch.uint8)
    if not to_all:
        for receiver in receivers:
            here = receiver == data.shard_rank
            takes = [(high - low) * own.itemsize if here else 0 for low, high in pieces]
            gives = [own.nbytes if rank == receiver else 0 for rank in range(len(members))]
            received = full_bytes if here else full_bytes[:0]
            dist.all_to_all_single(received, own.view(torch.uint8), takes, gives, group=group)
        return full if receives else None
    views = [full[low:high] for low, high in pieces]
    views[data.shard_rank].copy_(own)
    if len(members) > 1 and full.numel() == run.size * len(members):
        compat.all_gather(full_bytes, views[data.shard_rank].view(torch.uint8), group)
    elif len(members) > 1:
        for source, view in zip(members, views, strict=True):
            if view.numel():
                dist.broadcast(view.view(torch.uint8), src=source, group=group)
    return full


def tensors_of(run: Run, full: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors of a gathered run, views of it; if another parallelism cuts them, gathered over its mesh."""
    for param in run.members:
        first = _place(param).offset - run.start
        tensor = full[first : first + _place(param).numel].view(param.shape)
        if (other := param.other) is not None:
            tensor = DTensor.from_local(
                tensor, other.mesh, other.placements, run_check=False, shape=other.shape, stride=other.stride
            ).full_tensor()
        yield tensor
