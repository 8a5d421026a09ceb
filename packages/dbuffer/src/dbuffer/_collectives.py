"""Collectives on the buffers of one or several groups, each launched as one call.

source           destination                          operation
shard            full                                 all-gather (a cast into full's own slice first, if dtypes differ)
full             shard                                reduce-scatter, straight in where dtypes agree
full             own slice of full, then shard        reduce-scatter in place, then one cast or accumulate kernel
shard            shard                                all-reduce over replicas
own slice        shard (world size 1)                 the local part of the above
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from . import _direct
from . import _torch_compat as compat
from ._handle import Handle
from ._wire import Transfer

if TYPE_CHECKING:
    from ._buffer import DBuffer

Op = Literal["avg", "sum"]
_OPS = {"avg": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM}


def all_gather(
    buffers: Sequence["DBuffer"], *, stream: Any = None, after: Iterable[Any] | None = None
) -> Handle:
    """Gather the shards of all `buffers` into their full buffers: one all-gather, coalesced, over the shard dimension.

    Gives each rank's wire form to all others: (N-1) * shard bytes in the wire's dtype sent by each rank. Full
    buffers without memory get it first, on `stream`. World size 1 communicates nothing. After veScale-FSDP.

    Args:
        buffers: of one mesh and device, none busy; dtypes may differ.
        stream: where to launch (None: the current stream; CPU has none).
        after: events that must be over first. None: all that the current stream holds by now. Empty: nothing.

    Raises:
        ValueError: no buffer, one twice, or of different meshes or devices.
        RuntimeError: one has a collective under way.
    """
    first = _check(buffers, "all_gather")
    if any(buffer._share is not None for buffer in buffers):
        return _gather_shares(buffers, stream, after)
    with first.layer.on(stream, after):
        parts: list[tuple[DBuffer, list[Transfer]]] = []
        for buffer in buffers:
            buffer.materialize()
            if not buffer.aliased:
                parts.append((buffer, buffer._wire.encode(buffer.shard, buffer._own, buffer._raw_full)))
        pairs = [(t.receive, t.send) for _, transfers in parts for t in transfers if _must_travel(first, t)]
        work = _start_gather(buffers, pairs, first.mesh_view.group) if pairs else None

        launched_on = first.layer.current_stream()

        def decode() -> None:
            for buffer, transfers in parts:
                buffer._wire.decode(transfers, buffer._raw_full)
                if any(t.receive is not full for t, full in zip(transfers, buffer._raw_full, strict=False)):
                    # The wire form's own memory goes back to the launch's stream as soon as this returns.
                    first.layer.wait(first.layer.record(), launched_on)

        return _handle("all_gather", buffers, work, decode)


def _start_gather(
    buffers: Sequence["DBuffer"], pairs: list[tuple[torch.Tensor, torch.Tensor]], group: dist.ProcessGroup
) -> Any:
    with _named("all_gather", buffers):
        gather = _direct.all_gather if _direct.pays(pairs, group) else compat.all_gather
        return gather(pairs, group)


def _gather_shares(buffers: Sequence["DBuffer"], stream: Any, after: Iterable[Any] | None) -> Handle:
    """Gather what `DBuffer.shrink` left on the ranks of a smaller group."""
    first = buffers[0]
    shares = [buffer._share for buffer in buffers if buffer._share is not None]
    if len(shares) < len(buffers) or any(share.group is not shares[0].group for share in shares):
        raise ValueError(
            f"all_gather: of {[b.name for b in buffers]} only some were shrunk, or to different groups; "
            "shrink all or none of what is gathered together"
        )
    with first.layer.on(stream, after):
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for buffer, share in zip(buffers, shares, strict=True):
            first.layer.wait(share.ready)
            buffer.materialize()
            pairs += zip(buffer._raw_full, share.tensors, strict=True)
        work = _start_gather(buffers, pairs, shares[0].group)

        def forget() -> None:  # only now: the collective reads them on another stream
            for buffer in buffers:
                buffer.forget_share()

        return _handle("all_gather", buffers, work, forget)


def _must_travel(buffer: "DBuffer", transfer: Transfer) -> bool:
    if buffer.mesh_view.size > 1:
        return True
    if transfer.send.data_ptr() != transfer.receive.data_ptr():  # one rank, shard and full apart on request
        transfer.receive.copy_(transfer.send)
    return False


def reduce_scatter(
    buffers: Sequence["DBuffer"],
    *,
    op: Op = "avg",
    divide: float | None = None,
    accumulate: bool = False,
    stream: Any = None,
    after: Iterable[Any] | None = None,
) -> Handle:
    """Reduce the full buffers over the shard dimension; each rank's shard gets its part. One reduce-scatter, coalesced.

    Each rank sends (N-1)/N of its full buffers, in their dtype. The full buffers' contents are used up. Padding
    of the shard is zero afterwards, whatever was in the padding of the full buffers. World size 1 communicates
    nothing.

    Args:
        buffers: of one mesh and device, with memory in their full buffers, none busy.
        op: "avg" or "sum" over the ranks of the shard dimension.
        divide: with "sum": divide the sum by this, in the shard's dtype.
        accumulate: add to the shard instead of replacing it.
        stream, after: as for `all_gather`.

    Raises:
        ValueError: an unknown op, `divide` with "avg" or not positive, `accumulate` where shard and full are one
            memory, or buffers that do not go together.
        RuntimeError: a full buffer is released, or a collective is under way.
    """
    first = _check(buffers, "reduce_scatter")
    _check_reduction(op, divide)
    for buffer in buffers:
        buffer._check_materialized("reduce_scatter")
        if accumulate and buffer.aliased:
            raise ValueError(
                f"{buffer.name}: with one rank and one dtype shard and full are one memory, so nothing can be "
                "accumulated into it; add gradients into the views, or build the buffer with alias=False"
            )
    straight = [not buffer.casts and not buffer.apart and not accumulate for buffer in buffers]
    with first.layer.on(stream, after):
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for buffer, direct in zip(buffers, straight, strict=True):
            pairs += zip(buffer.shard if direct else buffer._own, buffer._raw_full, strict=True)
        work: Any = None
        if first.mesh_view.size > 1:
            group = first.mesh_view.group
            with _named("reduce_scatter", buffers):
                if _direct.pays(pairs, group):
                    work = _direct.reduce_scatter(pairs, op == "avg", group)
                else:
                    work = compat.reduce_scatter(pairs, _OPS[op], group)

        def finish() -> None:
            for buffer, direct in zip(buffers, straight, strict=True):
                direct = direct and (work is not None or buffer.aliased)
                _store(buffer, direct, accumulate, divide)

        return _handle("reduce_scatter", buffers, work, finish)


def _store(buffer: "DBuffer", direct: bool, accumulate: bool, divide: float | None) -> None:
    """Bring the reduced slice into the shard: no kernel, or one."""
    scale = 1.0 if divide is None else 1.0 / divide
    if buffer.apart:
        _bring_home(buffer, accumulate, scale)
        return
    if accumulate:
        compat.add(buffer.shard, buffer._own, alpha=scale)
    elif direct:
        if divide is not None:
            compat.scale(buffer.shard, scale)
    elif divide is not None:
        compat.copy_scaled(buffer.shard, buffer._own, scale)
    else:
        compat.copy(buffer.shard, buffer._own)
    compat.zero(buffer._gaps)


def _bring_home(buffer: "DBuffer", accumulate: bool, scale: float) -> None:
    """Copy the reduced slice to a shard on another device; an addition there needs it at once."""
    compat.zero(buffer._gaps)
    if scale != 1.0:
        compat.scale(buffer._own, scale)
    if accumulate:
        compat.add(buffer.shard, [own.to(buffer.shard_device) for own in buffer._own])
    else:
        compat.copy(buffer.shard, buffer._own, non_blocking=True)


def all_reduce(
    buffers: Sequence["DBuffer"],
    *,
    op: Op = "avg",
    divide: float | None = None,
    stream: Any = None,
    after: Iterable[Any] | None = None,
) -> Handle:
    """Reduce the shards over the replicate dimension, in place: one all-reduce, coalesced, in the shards' dtypes.

    Each rank sends 2 (R-1)/R of its shards for R replicas.

    Args:
        buffers: of one mesh and device, none busy.
        op, divide: as for `reduce_scatter`, over the replicas.
        stream, after: as for `all_gather`.

    Raises:
        ValueError: the mesh has no replicate dimension, or as for `reduce_scatter`.
        RuntimeError: one has a collective under way.
    """
    first = _check(buffers, "all_reduce")
    _check_reduction(op, divide)
    view = first.mesh_view
    if view.replicas is None:
        raise ValueError(
            f"{first.name}: all_reduce needs a replicate dimension; build the buffer with replicate_dim="
        )
    if len({buffer.dtype for buffer in buffers}) > 1:
        raise ValueError(
            f"all_reduce of several buffers needs one dtype, found {[(b.name, b.dtype) for b in buffers]}; "
            "call it once for each dtype"
        )
    with first.layer.on(stream, after):
        work = None
        shards = [shard for buffer in buffers for shard in buffer.shard]
        reduced = [shard.to(first.device) for shard in shards] if first.apart else shards
        if view.num_replicas > 1:
            work = compat.all_reduce(reduced, _OPS[op], view.replicas)

        def finish() -> None:
            if divide is not None:
                compat.scale(reduced, 1.0 / divide)
            if first.apart:
                compat.copy(shards, reduced, non_blocking=True)

        return _handle("all_reduce", buffers, work, finish)


def _check(buffers: Sequence["DBuffer"], what: str) -> "DBuffer":
    if not buffers or len({id(buffer) for buffer in buffers}) != len(buffers):
        raise ValueError(f"{what} needs at least one buffer, each once; got {[b.name for b in buffers]}")
    first = buffers[0]
    for buffer in buffers:
        buffer._check_idle(what)
        if buffer.mesh_view != first.mesh_view or buffer.device != first.device:
            raise ValueError(
                f"{what}: {buffer.name} is on {buffer.device} and {buffer.mesh_view.mesh}, "
                f"{first.name} on {first.device} and {first.mesh_view.mesh}; "
                "one call takes buffers of one mesh and device"
            )
    return first


def _check_reduction(op: str, divide: float | None) -> None:
    if op not in _OPS:
        raise ValueError(f"op is {op!r}; expected one of {sorted(_OPS)}")
    if divide is not None and (op != "sum" or not divide > 0):
        raise ValueError(
            f"divide={divide} with op={op!r}: it divides a sum by a positive number; use op='sum'"
        )


@contextmanager
def _named(what: str, buffers: Sequence["DBuffer"]) -> Iterator[None]:
    """Say in an error which collective could not start: ranks meet in the first large one of a group."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{_title(what, buffers)} could not start: {error}") from error


def _title(what: str, buffers: Sequence["DBuffer"]) -> str:
    return f"{what} of {', '.join(buffer.name for buffer in buffers)}"


def _handle(what: str, buffers: Sequence["DBuffer"], work: Any, finish: Callable[[], None]) -> Handle:
    def settle() -> None:
        for buffer in buffers:
            buffer._in_flight = None

    handle = Handle(_title(what, buffers), buffers[0].layer, work, finish, settle)
    for buffer in buffers:
        buffer._in_flight = handle
    return handle
