"""Runs of tensors that follow one another in a group's memory, gathered without a copy.

    segment, 3 ranks   |   rank 0   |   rank 1   |   rank 2   |
    a run                      [ a ][   b   ]                    rank 0 and rank 1 send their parts of it

The pieces of a run, rank by rank, are its tensors one after the other, so that they arrive where they belong.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ragged_shard.dist import on_all_ranks

from .. import _torch_compat as compat
from .._params.group import Group
from .targets import Target


@dataclass(frozen=True)
class Run:
    """Consecutive tensors of one segment of a group."""

    members: tuple[Target, ...]  # in the order of their memory
    dtype: torch.dtype  # in which they are gathered
    # start, stop: elements of the gathered segment
    start: int
    stop: int

    @property
    def group(self) -> Group:
        """Whose memory it is."""
        return self.members[0].group

    @property
    def segment(self) -> int:
        """In which segment."""
        return self.members[0].place.segment

    def piece(self, rank: int) -> tuple[int, int]:
        """The elements of the segment that a rank of the shard axis holds of the run."""
        size = self.group.plan.layout.segments[self.segment].shard_size
        low, high = max(self.start, rank * size), min(self.stop, (rank + 1) * size)
        return low, max(low, high)

    def own(self) -> tuple[torch.Tensor, int]:
        """This rank's piece, in memory of the shard, and where in the segment it begins."""
        plan, buffer = self.group.plan, self.group.buffer
        assert buffer is not None
        low, high = self.piece(plan.data.shard_rank)
        size = plan.layout.segments[self.segment].shard_size
        begin = low - plan.data.shard_rank * size if high > low else 0
        return buffer.shard[self.segment].detach()[begin : begin + high - low], low


def runs_of_entries(entries: Sequence[Target], dtypes: Sequence[torch.dtype], most: int) -> list[Run]:
    """Entries of groups in runs of at most `most` bytes; a larger tensor is a separate run."""
    runs: list[Run] = []
    members: list[Target] = []
    for index, entry in enumerate(entries):
        dtype, place, end = dtypes[index], entry.place, entry.place.offset + entry.place.numel
        if members:
            before = members[0].place
            same = members[0].group is entry.group and place.segment == before.segment
            same = same and dtype is dtypes[index - 1]
            if not same or (end - before.offset) * dtype.itemsize > most:
                runs.append(_run(members, dtypes[index - 1]))
                members = []
        members.append(entry)
    if members:
        runs.append(_run(members, dtypes[-1]))
    return runs


def _run(members: list[Target], dtype: torch.dtype) -> Run:
    first, last = members[0].place, members[-1].place
    run = Run(tuple(members), dtype, first.offset, last.offset + last.numel)
    layout = run.group.plan.layout
    segment = layout.segments[first.segment]
    if len(members) == len(segment.names):  # all of it, with the padding: one all-gather
        return replace(run, start=0, stop=segment.shard_size * layout.world_size)
    return run


def receivers_of(run: Run, ranks: Sequence[int] | None) -> list[int] | None:
    """Which ranks of the shard axis receive; None: all."""
    # Tensors that another parallelism cuts are gathered over its mesh afterwards, by all its ranks.
    if ranks is None or any(plan.cut_by_others for plan in run.group.plan.params):
        return None
    members = dist.get_process_group_ranks(run.group.plan.data.groups[-1])
    receivers = [index for index, rank in enumerate(members) if rank in ranks]
    return None if len(receivers) == len(members) else receivers


def gather(run: Run, receivers: list[int] | None) -> torch.Tensor | None:
    """The elements of a run, in its dtype, on receivers; None on others.

    One all-gather where the run is all of a segment and everyone receives; else one broadcast from each rank that holds
    some of it, or one all-to-all for each receiver. A receiver gets the bytes that it lacks and no others.
    Bytes are sent, since backends move few dtypes. Where one rank has no memory for them, all ranks raise.
    """
    data = run.group.plan.data
    to_all = receivers is None or data.shard_size == 1
    receives = to_all or data.shard_rank in (receivers or ())
    with on_all_ranks(f"gathering {run.members[0].name}", data.groups):
        piece, low = run.own()
        full = torch.empty(run.stop - run.start if receives else 0, dtype=run.dtype, device=data.device)
        own = piece if to_all else piece.to(data.device, run.dtype)
    if receivers is None or to_all:
        return _gather_to_all(run, own, low, full)
    nothing = full.new_empty(0)
    for receiver in receivers:
        here = receiver == data.shard_rank
        out = full if here else nothing
        pieces = [run.piece(rank) for rank in range(data.shard_size)]
        takes = [(high - first) * own.itemsize if here else 0 for first, high in pieces]
        gives = [own.nbytes if rank == receiver else 0 for rank in range(data.shard_size)]
        received_bytes, own_bytes = out.view(torch.uint8), own.view(torch.uint8)
        dist.all_to_all_single(received_bytes, own_bytes, takes, gives, group=data.groups[-1])
    return full if receives else None


def _gather_to_all(run: Run, piece: torch.Tensor, low: int, full: torch.Tensor) -> torch.Tensor:
    data, size = run.group.plan.data, run.group.plan.layout.segments[run.segment].shard_size
    if piece.numel():
        full[low - run.start : low - run.start + piece.numel()].copy_(piece)
    if data.shard_size == 1:
        return full
    group = data.groups[-1]
    pieces = [run.piece(rank) for rank in range(data.shard_size)]
    if all(high - first == size for first, high in pieces):
        compat.all_gather(full.view(torch.uint8), full[low : low + size].view(torch.uint8), group)
        return full
    members = dist.get_process_group_ranks(group)
    for rank, (first, high) in enumerate(pieces):
        if first < high:
            sent = full[first - run.start : high - run.start].view(torch.uint8)
            dist.broadcast(sent, src=members[rank], group=group)
    return full


def tensors_of(run: Run, full: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors of a gathered run, views of it; if another parallelism cuts them, gathered over its mesh."""
    for entry in run.members:
        param = entry.param
        assert param is not None
        first = entry.place.offset - run.start
        view = full[first : first + entry.place.numel].view(param.shape)
        if (other := param.other) is None:
            yield view
            continue
        placed = DTensor.from_local(
            view, other.mesh, other.placements, run_check=False, shape=other.shape, stride=other.stride
        )
        yield placed.full_tensor()
