"""Redistribution from one sharding to another: the steps, and the bytes that each step sends.

Along one mesh axis of N ranks, for a base tensor (which the other axes leave) of T bytes, of which rank r holds
own(r):

    from        to                 collective             bytes this rank sends to others
    ----------  -----------------  ---------------------  ---------------------------------------------
    Ragged      Replicate          all_gather  (equal)    (N-1) * own
                                   broadcast   (one-hot)  (N-1) * own: the holder's T, others nothing
                                   all_to_all  (else)     (N-1) * own
    Ragged      Ragged, Shard(d)   all_to_all             the bytes of own that other ranks will hold
    Shard(d)    Ragged             all_to_all             the bytes of own that other ranks will hold
    Replicate   Ragged             none                   0 (a copy of this rank's range)
    Partial     Ragged             reduce_scatter (equal) T - own' (own': bytes of its new share)
                                   all_to_all     (else)  T - own', then summed in rank order

No change leads to Partial, as with DTensor. If no byte changes rank there is no collective. Uneven shares are never
padded: an all-gather padded to the largest share would send (N-1) * max(own) from every rank, which is never less than
the all_to_all. A change on a mesh axis other than the ragged one acts on local tensors through torch's own
redistribution (an all-reduce for (Partial, Ragged) -> (Replicate, Ragged)). Everything else is a sequence of steps:
to Replicate on the ragged axis, torch's redistribution of the rest, and back to Ragged.

After veScale-FSDP (arXiv 2602.22437); the published code gathers the full tensor for Ragged -> Shard and all-reduces
for Partial -> Ragged.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ragged_shard import _comm
from ragged_shard._comm import Pending, done
from ragged_shard._geometry import REDUCTIONS, Box, Extent, axis_extents, shard_box
from ragged_shard._placement import RaggedShard
from ragged_shard._sharding import Sharding, contiguous_stride


def start(local: Tensor, source: Sharding, target: Sharding) -> Pending:
    """Start the transfer of a local tensor from sharding ``source`` to ``target``.

    If there are several steps, all but the last have completed on return. The result shares no storage with ``local``
    unless the shardings are equal.
    """
    if source == target:
        return done(local)
    if any(type(after) is Partial and after != before for before, after in _changes(source, target)):
        raise NotImplementedError(
            f"cannot redistribute from {source.placements} to {target.placements}: nothing becomes Partial, as with "
            "DTensor; wrap summands with RaggedDTensor.from_local"
        )
    if local.is_meta and target.local_shape is not None:
        return done(local.new_empty(target.local_shape))
    pending, current = done(local), source
    for following in path_between(source, target):
        pending = _step(pending.wait().detach(), current, following)
        current = following
    return pending


def together(
    locals_: Sequence[Tensor], sources: Sequence[Sharding], targets: Sequence[Sharding]
) -> list[Tensor]:
    """Local tensors in other shardings: one all_to_all for all that only change their ragged cut, else one by one.

    One for each dtype, and for each mesh axis that is cut. As in `start`, a result shares no storage with its source.
    """
    results = list(locals_)
    batches: dict[Any, list[int]] = {}
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        alone = locals_[i].is_meta or not _only_cut_elsewhere(source, target)
        batches.setdefault(i if alone else (source.mesh, source.axis, locals_[i].dtype), []).append(i)
    for batch in batches.values():
        first = batch[0]
        if len(batch) == 1:
            results[first] = start(locals_[first], sources[first], targets[first]).wait()
            continue
        axis = sources[first].axis
        assert axis is not None
        pieces, expected = [], []  # for each tensor: what goes to each rank, how much comes from it
        for i in batch:
            rank, before, after = sources[i].coordinate[axis], _runs(sources[i]), _runs(targets[i])
            sizes = [_overlap(before[rank], other) for other in after]
            pieces.append(locals_[i].contiguous().view(-1).split(sizes))
            expected.append([_overlap(other, after[rank]) for other in before])
        outgoing, incoming = list(zip(*pieces, strict=True)), list(zip(*expected, strict=True))  # by rank
        received = _comm.all_to_all(
            torch.cat([piece for to_rank in outgoing for piece in to_rank]),
            [sum(piece.numel() for piece in to_rank) for to_rank in outgoing],
            [sum(from_rank) for from_rank in incoming],
            sources[first].mesh.get_group(axis),
        ).wait()
        arrived = received.split([size for from_rank in incoming for size in from_rank])
        for position, i in enumerate(batch):
            local_shape = targets[i].local_shape
            assert local_shape is not None
            results[i] = torch.cat(arrived[position :: len(batch)]).view(local_shape)
    return results


def _only_cut_elsewhere(source: Sharding, target: Sharding) -> bool:
    """Whether both are plainly ragged on one axis, and placed equally on the others."""
    axis = source.axis
    if axis is None or axis != target.axis or not type(source.ragged) is type(target.ragged) is RaggedShard:
        return False
    return all(other == axis or p == q for other, (p, q) in enumerate(_changes(source, target)))


def _runs(sharding: Sharding) -> tuple[Extent, ...]:
    """What each rank of the ragged axis holds of the elements that the other axes leave."""
    axis = sharding.axis
    assert axis is not None
    neutral = (*sharding.placements[:axis], Replicate(), *sharding.placements[axis + 1 :])
    base = shard_box(neutral, tuple(sharding.mesh.shape), tuple(sharding.shape), sharding.coordinate).sizes
    return axis_extents(base, sharding.ragged, sharding.axis_size(axis))


def _changes(source: Sharding, target: Sharding) -> list[tuple[Placement, Placement]]:
    return list(zip(source.placements, target.placements, strict=True))


def path_between(source: Sharding, target: Sharding) -> list[Sharding]:
    """The shardings on the way from source (not included) to target, each one step from the one before."""
    path: list[Sharding] = []
    current = source

    def go(following: Sharding) -> None:
        nonlocal current
        if following != current:
            path.append(following)
            current = following

    for axis, goal in enumerate(target.placements):  # changes that are possible while the tensor is ragged
        if current.axis is None or axis == current.axis:
            continue
        pending = type(current.placements[axis]) is Partial and type(goal) is not Partial
        if (pending or target.axis == current.axis) and _acts_on_local(current, axis, goal):
            go(current.replace(axis, goal))
        elif pending and type(goal) is Shard:
            go(current.replace(axis, Replicate()))
    if current == target:
        return path
    if current.axis is not None:
        goal = target.placements[current.axis]
        changes = enumerate(_changes(current, target))
        others_fit = all(axis == current.axis or before == after for axis, (before, after) in changes)
        if others_fit and (isinstance(goal, RaggedShard) or _commutes(current, current.axis, goal)):
            go(target)
            return path
        direct = _commutes(current, current.axis, goal)
        go(current.replace(current.axis, goal if direct else Replicate()))
    if target.axis is None:
        go(target)
        return path
    placement = current.placements[target.axis]
    summed = type(placement) is Partial and placement.reduce_op in REDUCTIONS
    commutes = type(placement) is not Partial and _commutes(target, target.axis, placement)
    go(target.replace(target.axis, placement if summed or commutes else Replicate()))
    go(target)
    return path


def _commutes(sharding: Sharding, axis: int, placement: Placement) -> bool:
    """Whether ``placement`` on this axis cuts none of the dimensions that a Shard on another axis cuts."""
    if type(placement) is not Shard:
        return type(placement) in (Replicate, Partial)
    if sharding.axis_size(axis) == 1:
        return True
    others = (p for a, p in enumerate(sharding.placements) if a != axis and sharding.axis_size(a) > 1)
    return all(type(p) is not Shard or p.dim != placement.dim for p in others)


def _acts_on_local(sharding: Sharding, axis: int, goal: Placement) -> bool:
    """Whether a non-ragged axis can change to ``goal`` on local tensors alone, without changing the ragged cut."""
    k, single = len(sharding.ragged.dims), sharding.axis_size(axis) == 1

    def outside_prefix(p: Placement) -> bool:
        return type(p) in (Replicate, Partial) or (type(p) is Shard and (p.dim >= k or single))

    placement = sharding.placements[axis]
    if not (outside_prefix(placement) and outside_prefix(goal)):
        return False
    return _commutes(sharding, axis, goal) and _commutes(sharding, axis, placement)


def _step(local: Tensor, source: Sharding, target: Sharding) -> Pending:
    if source.axis is None and target.axis is None:
        placements = list(source.placements), list(target.placements)
        return done(_torch_redistribute(local, source.mesh, *placements, source.shape))
    (axis,) = [axis for axis, (before, after) in enumerate(_changes(source, target)) if before != after]
    if axis in (source.axis, target.axis):
        return _ragged_step(local, source, target, axis)
    return done(_other_axis_step(local, source, target, axis))


def _ragged_step(local: Tensor, source: Sharding, target: Sharding, axis: int) -> Pending:
    """A step along the axis on which the tensor is, or will be, ragged."""
    neutral = (*source.placements[:axis], Replicate(), *source.placements[axis + 1 :])
    mesh_shape = tuple(source.mesh.shape)
    base = shard_box(neutral, mesh_shape, tuple(source.shape), source.coordinate).sizes
    before, after = source.placements[axis], target.placements[axis]
    num_ranks, rank = mesh_shape[axis], source.coordinate[axis]
    parts, wanted = axis_extents(base, before, num_ranks), axis_extents(base, after, num_ranks)
    group = source.mesh.get_group(axis)
    shape = wanted[rank].shape
    if type(before) is Partial:
        pending = _scatter_sum(local, wanted, rank, group, before)
    elif type(before) is Replicate:
        return done(_take(local, wanted[rank]))
    elif type(after) is Replicate:
        pending = _gather(local, parts, rank, group)
    else:
        pending = all_to_all(local, base, parts, wanted, rank, group)
    return Pending(lambda: pending.wait().view(shape))


def _lengths(extents: tuple[Extent, ...]) -> list[int]:
    return [math.prod(extent.shape) for extent in extents]


def _take(replica: Tensor, wanted: Extent) -> Tensor:
    """Replicate -> Ragged: a copy of this rank's range, so that the replica's storage can be freed."""
    assert wanted.flat is not None
    first, last = wanted.flat
    return replica.reshape(-1)[first:last].clone().view(wanted.shape)


def _gather(local: Tensor, extents: tuple[Extent, ...], rank: int, group: ProcessGroup) -> Pending:
    """Ragged -> Replicate; the table above says by which collective."""
    counts = _lengths(extents)
    flat = local.contiguous().view(-1)
    holders = [r for r, count in enumerate(counts) if count]
    if len(counts) == 1 or not holders:
        return done(flat.clone())
    if len(set(counts)) == 1:
        return _comm.all_gather(flat, group)
    if len(holders) == 1:
        gathered = flat.clone() if rank == holders[0] else flat.new_empty(sum(counts))
        return _comm.broadcast(gathered, holders[0], group)
    return _comm.all_to_all(flat.repeat(len(counts)), [counts[rank]] * len(counts), counts, group)


def _scatter_sum(
    local: Tensor, wanted: tuple[Extent, ...], rank: int, group: ProcessGroup, partial: Partial
) -> Pending:
    """Partial -> Ragged: the traffic of a reduce-scatter."""
    if local.dtype == torch.bool or (partial.reduce_op == "avg" and not local.is_floating_point()):
        raise TypeError(f"{partial} of {local.dtype} is not defined: it takes numbers (avg: floating point)")
    counts = _lengths(wanted)
    flat = local.contiguous().view(-1)
    num_ranks, own = len(counts), counts[rank]
    if num_ranks == 1 or not sum(counts):
        summed = done(flat.clone())
    elif len(set(counts)) == 1:
        summed = _comm.reduce_scatter(flat, group)
    else:
        received = _comm.all_to_all(flat, counts, [own] * num_ranks, group)

        def add() -> Tensor:
            summands = received.wait().view(num_ranks, own)
            total = summands[0].clone()
            for summand in summands[1:]:
                total += summand
            return total

        summed = Pending(add)
    if partial.reduce_op == "avg":
        return Pending(lambda: summed.wait().div_(num_ranks))
    return summed


def all_to_all(
    local: Tensor,
    base: tuple[int, ...],
    sources: tuple[Extent, ...],
    wanted: tuple[Extent, ...],
    rank: int,
    group: ProcessGroup,
) -> Pending:
    """Between Ragged and Ragged or Shard(d): each rank sends its elements to their next holders."""
    if all(h.boxes == w.boxes for h, w in zip(sources, wanted, strict=True)):
        return done(local.clone(memory_format=torch.contiguous_format))
    if all(extent.flat is not None for extent in sources + wanted):
        return _all_to_all_runs(local, sources, wanted, rank, group)
    outgoing = [_common(sources[rank], wanted[peer]) for peer in range(len(sources))]
    incoming = [_common(sources[peer], wanted[rank]) for peer in range(len(sources))]
    pieces = [_view(local, base, sources[rank], box).reshape(-1) for boxes in outgoing for box in boxes]
    send = torch.cat(pieces) if pieces else local.new_empty(0)
    received = _comm.all_to_all(send, _numels(outgoing), _numels(incoming), group)

    def unpack() -> Tensor:
        flat = received.wait()
        result = local.new_empty(wanted[rank].shape)
        position = 0
        for boxes in incoming:
            for box in boxes:
                piece = flat[position : position + box.numel].view(box.sizes)
                _view(result, base, wanted[rank], box).copy_(piece)
                position += box.numel
        return result

    return Pending(unpack)


def _all_to_all_runs(
    local: Tensor, sources: tuple[Extent, ...], wanted: tuple[Extent, ...], rank: int, group: ProcessGroup
) -> Pending:
    """The same where all extents are runs of the flattened base: the local tensor itself is the send buffer."""
    send_counts = [_overlap(sources[rank], other) for other in wanted]
    recv_counts = [_overlap(other, wanted[rank]) for other in sources]
    return _comm.all_to_all(local.contiguous().view(-1), send_counts, recv_counts, group)


def _overlap(a: Extent, b: Extent) -> int:
    """How many elements two runs of one base have in common."""
    assert a.flat is not None
    assert b.flat is not None
    return max(0, min(a.flat[1], b.flat[1]) - max(a.flat[0], b.flat[0]))


def _common(a: Extent, b: Extent) -> list[Box]:
    overlaps = (x.intersection(y) for x in a.boxes for y in b.boxes)
    return [box for box in overlaps if box is not None]


def _numels(boxes_by_rank: list[list[Box]]) -> list[int]:
    return [sum(box.numel for box in boxes) for boxes in boxes_by_rank]


def _view(local: Tensor, base: tuple[int, ...], extent: Extent, box: Box) -> Tensor:
    """The elements of ``box`` (offsets in the base) in a local tensor that holds ``extent``, as a view."""
    if extent.flat is None:
        (own,) = extent.boxes
        return local[box.moved(tuple(-o for o in own.offsets)).slices()]
    return run_view(local, base, extent.flat[0], box)


def run_view(local: Tensor, base: tuple[int, ...], first: int, box: Box) -> Tensor:
    """The elements of ``box`` in a contiguous tensor that holds the run of the flattened ``base`` from ``first`` on."""
    stride = contiguous_stride(base)
    offset = sum(o * s for o, s in zip(box.offsets, stride, strict=True)) - first
    return local.as_strided(box.sizes, stride, local.storage_offset() + offset)


def box_views(local: Tensor, sharding: Sharding) -> list[tuple[Box, Tensor]]:
    """This rank's boxes of the full tensor, each with the view of the local tensor that holds it."""
    region = sharding.region
    assert region is not None
    base, origin = region.box.sizes, tuple(-offset for offset in region.box.offsets)
    first = region.start * math.prod(base[region.prefix :])
    return [(box, run_view(local, base, first, box.moved(origin))) for box in region.boxes()]


def _other_axis_step(local: Tensor, source: Sharding, target: Sharding, axis: int) -> Tensor:
    """A step on an axis other than the ragged one, on local tensors: their dim 0 stands for the flattened dims."""
    if source.axis_size(axis) == 1:
        return local.clone()
    shift = len(source.ragged.dims) - 1
    shape = source.replace(axis, Replicate()).local_shape
    assert shape is not None

    def local_placement(p: Placement) -> Placement:
        return Shard(p.dim - shift) if type(p) is Shard else p

    before, after = (local_placement(sharding.placements[axis]) for sharding in (source, target))
    replicas: list[Placement] = [Replicate()] * len(source.placements)
    old, new = list(replicas), list(replicas)
    old[axis], new[axis] = before, after
    return _torch_redistribute(local, source.mesh, old, new, shape)


def _torch_redistribute(
    local: Tensor, mesh: DeviceMesh, before: list[Placement], after: list[Placement], shape: torch.Size
) -> Tensor:
    stride = contiguous_stride(shape)
    dtensor = DTensor.from_local(local, mesh, before, run_check=False, shape=shape, stride=stride)
    moved = dtensor.redistribute(mesh, after).to_local()
    wait = getattr(moved, "wait", None)  # torch may return a tensor that is still being received
    moved = (wait() if wait is not None else moved).contiguous()
    shared = moved.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    return moved.clone() if shared else moved
