"""`iter_full_params`: a model's whole tensors one run of memory after the other, for files and inference engines."""

import bisect
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn

from ragged_shard import DISTRIBUTED, gather_from_ranks, same_on_all_ranks

from .. import _torch_compat as compat
from .changes import (
    ChangedBlocks,
    ChangedElements,
    ExportedParams,
    changed_elements,
    changed_ranges,
    has_changed,
)
from .runs import Run, gather, receivers_of, runs_of_entries, tensors_of
from .targets import Entry, entries_of_model

_CALLER = "iter_full_params"
Changed = tuple[
    torch.Tensor, torch.Tensor
]  # positions in a segment, or starts and stops of ranges; and their values


@overload
def iter_full_params(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = ...,
    bucket_bytes: int = ...,
    ranks: Collection[int] | None = ...,
    changed_since: None = ...,
) -> Iterator[tuple[str, torch.Tensor]]: ...


@overload
def iter_full_params(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = ...,
    bucket_bytes: int = ...,
    ranks: Collection[int] | None = ...,
    changed_since: ExportedParams,
) -> Iterator[ChangedBlocks]: ...


def iter_full_params(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = 1 << 30,
    ranks: Collection[int] | None = None,
    changed_since: ExportedParams | None = None,
) -> Iterator[Any]:
    """The parameters of a model, sharded or not, as `(name, whole plain tensor)`; every rank iterates to the end.

    All ranks go in step, unit by unit in the order of memory, each in runs of tensors that follow one another: one
    all-gather where a run is all of a segment, else one broadcast from each rank that holds some of it; with `ranks`
    one all-to-all for each of them. Each receiver is sent what it lacks, in `dtype`, once. Tensors of other parallelism
    are then gathered over that; those that are kept as codes or as tensor subclasses, and DTensors, one at a time on
    all ranks. At first one all-gather of small objects compares the arguments.

    Memory for it is at most `bucket_bytes` at any time, as long as the caller holds nothing but the last tensor; or
    twice the largest tensor, where that is more (with `ranks` three times). Tensors are the caller's; those of one run
    share memory. Of tied parameters the first name comes. The parameters must not change meanwhile.

    With `changed_since` come `ChangedBlocks` instead: what differs from the last export with that object, by bits of
    `dtype`, in blocks of `fully_shard`'s policy (rows by default); tensors that come one at a time, whole. It costs a
    copy of the shard in `dtype` and a comparison; only changed blocks travel, with 16 bytes for each range of them and
    16 bytes a run and rank to say how many. No change is missed.

    Args:
        model: in which no forward or backward is under way.
        dtype: of floating-point tensors. Defaults to what they are kept in.
        bucket_bytes: of gathered memory.
        ranks: global ranks that receive; the others iterate over nothing, but take part. Defaults to all.
        changed_since: from the last export, or new.

    Raises:
        ValueError: a parameter on meta, no positive `bucket_bytes`, unknown ranks, or arguments that differ between
            ranks; on every rank.
    """
    exporter = Exporter(model, dtype, bucket_bytes, ranks, buffers=False)
    if changed_since is None:
        return exporter.tensors()
    return exporter.changes(changed_since)


class Exporter:
    """What to gather, agreed on by all ranks.

    Args:
        buffers: persistent buffers too.
        keep: whether a tensor keeps its dtype.

    Attributes:
        entries: in the order in which they come.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None,
        bucket_bytes: int,
        ranks: Collection[int] | None,
        *,
        buffers: bool,
        keep: Callable[[Entry], bool] = lambda entry: False,
        caller: str = _CALLER,
    ) -> None:
        problem: Exception | None = None
        self.entries: list[Entry] = []
        self._ranks = None if ranks is None else tuple(sorted(ranks))
        self._dtype, self._keep = dtype, keep
        try:
            _check(bucket_bytes, self._ranks)
            self.entries = entries_of_model(model, buffers=buffers)
        except Exception as error:  # the other ranks must not wait for this one
            problem = error
        options = {"dtype": dtype, "bucket_bytes": bucket_bytes, "ranks": self._ranks}
        same_on_all_ranks(options, error=problem, caller=caller)
        grouped = [entry for entry in self.entries if entry.param is not None]
        self._single = [entry for entry in self.entries if entry.param is None]
        dtypes = [self.dtype_of(entry) for entry in grouped]
        # The caller still holds the last run when the next is gathered; and a slice may be cast to be sent.
        self._runs = runs_of_entries(grouped, dtypes, bucket_bytes // (2 if ranks is None else 3))

    def dtype_of(self, entry: Entry) -> torch.dtype:
        """In which a tensor is exported."""
        tensor = entry.tensor
        if self._dtype is None or self._keep(entry) or not tensor.is_floating_point():
            return tensor.dtype
        return self._dtype

    def on_meta(self) -> dict[str, torch.Tensor]:
        """The tensors that come, on meta, in their order."""
        return {
            e.name: torch.empty(e.tensor.shape, dtype=self.dtype_of(e), device="meta") for e in self.entries
        }

    @property
    def _receives(self) -> bool:
        return self._ranks is None or (dist.get_rank() if dist.is_initialized() else 0) in self._ranks

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All of them, whole."""
        for run in self._runs:
            yield from self._whole_run(run)
        for entry in self._single:
            yield from self._whole_entry(entry)

    def _whole_run(self, run: Run) -> Iterator[tuple[str, torch.Tensor]]:
        with torch.no_grad():
            full = gather(run, receivers_of(run, self._ranks))
        if full is None:
            return
        tensors = tensors_of(run, full)
        del full
        while True:
            with torch.no_grad():
                pair = next(tensors, None)
            if pair is None:
                return
            if self._receives:
                yield pair
            del pair

    def _whole_entry(self, entry: Entry) -> Iterator[tuple[str, torch.Tensor]]:
        tensor: Any = entry.tensor
        with torch.no_grad():
            own = True  # whether the whole tensor is the model's own memory
            if isinstance(tensor, DISTRIBUTED):
                own = all(placement.is_replicate() for placement in tensor.placements)
                tensor = tensor.full_tensor()
            if self._receives:
                tensor = tensor.to(self.dtype_of(entry), copy=own)
        if self._receives:
            yield entry.name, tensor

    # -- only what changed ------------------------------------------------------------------------------------------

    def changes(self, exported: ExportedParams) -> Iterator[ChangedBlocks]:
        """Blocks that differ from the last export."""
        for run, changes in self._changed(exported, changed_ranges):
            if run is None:
                yield from map(_as_changed, changes)
            while run is not None and changes:
                yield from _by_tensor(run, *changes.pop(0))

    def elements(self, exported: ExportedParams) -> Iterator[ChangedElements]:
        """Elements that differ from the last export, tensor by tensor; whole tensors where `changes` has them."""
        for run, changes in self._changed(exported, changed_elements):
            if run is None:
                yield from map(_all_elements, changes)
            elif changes:
                places, values = map(torch.cat, zip(*changes, strict=True))
                del changes
                yield from _elements_by_tensor(run, places, values)

    def _changed(
        self, exported: ExportedParams, find: Callable[..., Changed]
    ) -> Iterator[tuple[Run | None, Any]]:
        """Runs with each rank's changes, and None with an iterator over tensors that come as a whole."""
        valid = all(gather_from_ranks(exported.complete and exported.receivers == self._ranks))
        exported.begin(valid=valid)
        whole = [run for run in self._runs if run.cut_by_others]
        single = [*self._single, *(entry for run in whole for entry in run.members)]
        with torch.no_grad():
            mine = {e.name for e in single if has_changed(e, self.dtype_of(e), exported)}
        changed = set[str]().union(*gather_from_ranks(mine)) if single else set()
        for run in self._runs:
            if run in whole:
                parts = runs_of_entries(
                    kept := [e for e in run.members if e.name in changed], [run.dtype] * len(kept), 0
                )
                for part in parts:
                    yield None, self._whole_run(part)
            else:
                with torch.no_grad():
                    pieces = _exchange(run, receivers_of(run, self._ranks), exported, find)
                yield run, pieces
        for entry in self._single:
            if entry.name in changed:
                yield None, self._whole_entry(entry)
        exported.end(self._ranks)


def _check(bucket_bytes: int, ranks: Sequence[int] | None) -> None:
    if type(bucket_bytes) is not int or bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes!r}; expected a number of bytes from 1")
    size = dist.get_world_size() if dist.is_initialized() else 1
    if ranks is not None and (not ranks or any(not 0 <= rank < size for rank in ranks)):
        raise ValueError(f"ranks is {ranks}; expected some of the global ranks 0 to {size - 1}")


def _as_changed(pair: tuple[str, torch.Tensor]) -> ChangedBlocks:
    name, tensor = pair
    return ChangedBlocks(name, tuple(tensor.shape), ((0, tensor.numel()),), tensor.contiguous().view(-1))


def _all_elements(pair: tuple[str, torch.Tensor]) -> ChangedElements:
    name, tensor = pair
    indices = torch.arange(tensor.numel(), device=tensor.device)
    return ChangedElements(name, tuple(tensor.shape), indices, tensor.contiguous().view(-1))


def _exchange(
    run: Run, receivers: list[int] | None, exported: ExportedParams, find: Callable[..., Changed]
) -> list[Changed]:
    """What each rank of the shard axis found changed in a run, on receivers; nothing on others."""
    data = run.group.plan.data
    piece, low = run.own()
    own = piece.to(data.device, run.dtype)
    flat, values = find(run, own, low, exported)
    if data.shard_size == 1:
        return [(flat, values)] if flat.numel() and receivers is None else []
    group, members = data.groups[-1], dist.get_process_group_ranks(data.groups[-1])
    counts = torch.empty(2 * data.shard_size, dtype=torch.int64, device=data.device)
    here = counts[2 * data.shard_rank : 2 * data.shard_rank + 2]
    here.copy_(torch.tensor([flat.numel(), values.numel()]))
    compat.all_gather(counts, here, group)
    changes: list[Changed] = []
    for rank, (num_edges, num_values) in enumerate(counts.view(-1, 2).tolist()):
        if not num_edges:
            continue
        mine = rank == data.shard_rank
        takes = receivers is None or data.shard_rank in receivers
        edges = flat if mine else flat.new_empty(num_edges if takes else 0)
        sent = values if mine else values.new_empty(num_values if takes else 0)
        for tensor in (edges, sent):
            _give(tensor.view(torch.uint8), rank, receivers, data.shard_rank, members, group)
        if takes:
            changes.append((edges, sent))
    return changes


def _give(
    tensor: torch.Tensor,
    source: int,
    receivers: list[int] | None,
    rank: int,
    members: list[int],
    group: dist.ProcessGroup,
) -> None:
    """From one rank to all, or to some."""
    if receivers is None:
        dist.broadcast(tensor, src=members[source], group=group)
        return
    for receiver in receivers:
        if receiver == source:
            continue
        gives = [tensor.numel() if rank == source and peer == receiver else 0 for peer in range(len(members))]
        takes = [tensor.numel() if rank == receiver and peer == source else 0 for peer in range(len(members))]
        out = tensor if rank == receiver else tensor[:0]
        sent = tensor if rank == source else tensor[:0]
        dist.all_to_all_single(out, sent, takes, gives, group=group)


def _by_tensor(run: Run, edges: torch.Tensor, values: torch.Tensor) -> Iterator[ChangedBlocks]:
    """The changed blocks of one rank, tensor by tensor."""
    ranges = [(int(start), int(stop)) for start, stop in edges.view(-1, 2).tolist()]
    begins = [entry.place.offset for entry in run.members]
    ranges_of: dict[int, list[tuple[int, int]]] = {}
    for start, stop in ranges:
        ranges_of.setdefault(bisect.bisect_right(begins, start) - 1, []).append((start, stop))
    at = 0
    for index, own in ranges_of.items():
        entry, count = run.members[index], sum(stop - start for start, stop in own)
        offset = entry.place.offset
        inside = tuple((start - offset, stop - offset) for start, stop in own)
        yield ChangedBlocks(entry.name, tuple(entry.tensor.shape), inside, values[at : at + count])
        at += count


def _elements_by_tensor(run: Run, places: torch.Tensor, values: torch.Tensor) -> Iterator[ChangedElements]:
    """The changed elements of all ranks, which are ascending, tensor by tensor."""
    begins = torch.tensor([entry.place.offset for entry in run.members], device=places.device)
    counts = torch.bincount(
        torch.searchsorted(begins, places, right=True) - 1, minlength=len(begins)
    ).tolist()
    parts = zip(run.members, places.split(counts), values.split(counts), strict=True)
    for entry, indices, part in parts:
        if part.numel():
            shape = tuple(entry.tensor.shape)
            yield ChangedElements(entry.name, shape, indices - entry.place.offset, part)
