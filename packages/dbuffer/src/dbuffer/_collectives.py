"""Collectives on one or several buffers, each launched as one coalesced call.

`Gather`, `ReduceScatter` and `AllReduce` check their buffers once and can be started repeatedly. `start` takes the
stream to launch on (default: the current one; CPU has none) and the events that must have completed first (None: all
work queued on the current stream; empty: nothing) and returns a `Handle` to wait on. World size 1 communicates nothing.

source           destination                            operation
shard            gathered                               all-gather (a cast into the own slice first, if dtypes differ)
gathered         shard                                  reduce-scatter, straight in where dtypes agree
gathered         own slice of gathered, then shard      reduce-scatter in place, then one cast or accumulate kernel
shard            shard                                  all-reduce over replicas
gathered         shard                                  with a reduction form: encode, all-to-all, sum
own slice        shard (world size 1)                   the local half of the above
kept slices      gathered                               all-gather in a smaller group, after `shrink`
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from . import _torch_compat as compat
from ._buffer import DBuffer
from ._encoding import Exchange
from ._order import DisagreementError, wait_in_order, watched
from .memory.gathered import Flats, NeighborSlices
from .transport import Op, Pairs, Transport, TransportChoice, Work, resolved, transport_of

Events = Iterable[Any]


class Handle:
    """A collective under way, of one or several buffers.

    On CUDA `wait` makes the current stream wait and does not block the CPU; on CPU it blocks until the data are
    there. Wait as often as you like, on as many streams as you like. Until the first `wait` has returned, or raised
    the collective's RuntimeError, the buffers count as busy; a signal handler's exception leaves the collective
    under way, and the next `wait` continues.

    Attributes:
        completed: whether its result is there, or queued.
        title: kind and buffers; the same on all ranks.
        group: who takes part; None: this rank alone.
    """

    def __init__(self, title: str, buffers: Sequence[DBuffer], group: dist.ProcessGroup | None) -> None:
        self.completed = False
        self.title, self.group = title, group
        self._buffers = buffers
        self._layer = buffers[0].layer
        self._work: Work | None = None
        self._finish: Callable[[], None] | None = None
        self._event: Any = None
        self._error: RuntimeError | None = None
        self._half_done = True  # until it is started, and while its result is written
        for buffer in buffers:
            buffer.in_flight = self

    def launch(self, start: Callable[[], Work | None], finish: Callable[[], None] | None) -> "Handle":
        """Start the work. From the moment this is called, the buffers' memory may be in use.

        Args:
            start: starts it; None: nothing has to travel, or it was queued on the current stream.
            finish: queues the rest when it has completed.

        Raises:
            RuntimeError: it could not start.
        """
        self._finish = finish
        order = None if self.group is None else watched.get(self.group)
        may_run = False
        try:
            if order is not None:
                order.start(self.title, self._layer)
            may_run = True
            self._work = start()
            if self._layer.asynchronous:
                self._event = self._layer.record()  # all that was queued on the stream of the launch
            self._half_done = False
        except BaseException as error:
            self._fail(f"could not start: {error}", quiet=not may_run)  # some of it may run all the same
            if isinstance(error, RuntimeError):
                raise RuntimeError(f"{self.title} could not start: {error}") from error
            raise
        return self

    def wait(self) -> None:
        """Order later work on the current stream after the result.

        Raises:
            RuntimeError: the collective failed (a rank died, a timeout); says which and of which buffers. Again
                on each call.
        """
        if self._error is None:
            if self._event is not None:
                self._layer.wait(self._event)
            if not self.completed:
                self._complete()
        self._let_go()  # here too, in case an exception kept an earlier call from it
        if self._error is not None:
            raise self._error

    def _complete(self) -> None:
        """Wait, and write the result: once, or never where that was interrupted."""
        if self._half_done:
            self._fail("was interrupted while it was started or its result was written", quiet=False)
            return
        work = self._work
        try:
            if work is None:
                pass
            elif self._layer.asynchronous:
                work.wait()
            else:
                wait_in_order(work, self.group)
        except DisagreementError:
            raise  # it is under way still
        except RuntimeError as error:
            interrupted = getattr(work, "under_way", False) or compat.is_interrupt(work, error)
            if work is None or interrupted or compat.has_succeeded(work):
                raise  # from a signal handler
            self._fail(f"failed: {error}", quiet=getattr(work, "quiet", False), cause=error)
            return
        self._half_done = True
        try:
            if self._finish is not None:
                self._finish()
            if self._layer.asynchronous:
                self._event = self._layer.record()
            self.completed, self._half_done = True, False
        except BaseException as error:
            self._fail(f"was interrupted while its result was written: {error!r}", quiet=True)
            raise

    def _fail(self, why: str, *, quiet: bool, cause: BaseException | None = None) -> None:
        if not quiet:
            for buffer in self._buffers:
                buffer.retire()
        error = RuntimeError(f"{self.title} {why}")
        error.__cause__ = cause
        self._error = error
        self._let_go()

    def _let_go(self) -> None:
        """The buffers are free, unless another collective has them by now."""
        for buffer in self._buffers:
            if buffer.in_flight is self:
                buffer.in_flight = None
        self._work = self._finish = None


class Gather:
    """All-gather of buffers' shards into their gathered memory, over the shard axis.

    Each rank sends its shard in the wire's dtype to all others: (N-1) * shard bytes. Buffers without gathered memory
    get it first, on the stream of the start.

    Args:
        buffers: on one mesh and device; dtypes may differ.
        transport: for this gather. Defaults to the buffers'.

    Raises:
        ValueError: no buffer, one twice, buffers of different meshes or devices, or an unknown transport.
    """

    def __init__(self, buffers: Sequence[DBuffer], transport: TransportChoice | None = None) -> None:
        self._buffers = _checked(buffers, "all_gather")
        self._choice = buffers[0].transport if transport is None else resolved(transport)
        self._label = _label(buffers)
        self._title = f"all_gather of {self._label}"
        self._group = buffers[0].mesh_view.group
        self._layer = buffers[0].layer
        self._size = buffers[0].mesh_view.size
        self._decodes = any(buffer.encoder is not None for buffer in buffers)
        self._transport: Transport | None = None

    def start(self, stream: Any = None, after: Events | None = None) -> Handle:
        """Start gathering.

        Raises:
            RuntimeError: a buffer has a collective under way, or the collective could not start.
            torch.OutOfMemoryError: there is no memory to gather into. All is as before; it can be started again.
        """
        buffers, layer = self._buffers, self._layer
        shrunk = False
        for buffer in buffers:
            if buffer.in_flight is not None:
                buffer.check_idle("all_gather")
            shrunk = shrunk or buffer.neighbor is not None
        if shrunk:
            return _gather_neighbors(buffers, self._choice, stream, after)
        with layer.on(stream, after):
            pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
            try:
                for buffer in buffers:
                    pairs += buffer.begin_gather()
            except BaseException as error:
                _give_back(buffers, error)
                raise
            finish = self._decode_after(layer.current_stream()) if self._decodes else None
            return Handle(self._title, buffers, self._group).launch(partial(self._send, pairs), finish)

    def _send(self, pairs: Pairs) -> Work | None:
        if self._size == 1:
            for receive, send in pairs:  # one rank, shard and gathered memory apart by request
                if receive.data_ptr() != send.data_ptr():
                    receive.copy_(send)
            return None
        if self._transport is None:
            self._transport = transport_of(self._group, self._choice)
        return self._transport.all_gather(pairs, self._label)

    def _decode_after(self, launched_on: Any) -> Callable[[], None]:
        layer, buffers = self._layer, self._buffers

        def decode() -> None:
            for buffer in buffers:
                if buffer.encoder is not None and buffer.encoder.decode():
                    layer.wait(layer.record(), launched_on)

        return decode


def _gather_neighbors(
    buffers: Sequence[DBuffer], choice: TransportChoice, stream: Any, after: Events | None
) -> Handle:
    """Gather the slices that `DBuffer.shrink` kept, over the smaller group."""
    kept = [buffer.neighbor for buffer in buffers if buffer.neighbor is not None]
    group = kept[0].group
    if len(kept) < len(buffers) or any(slices.group is not group for slices in kept):
        raise ValueError(
            f"all_gather: of {[buffer.name for buffer in buffers]} only some were shrunk, or to different groups; "
            "shrink all or none of the buffers that are gathered together"
        )
    layer = buffers[0].layer
    what = f"the slices kept by shrink of {_label(buffers)}"

    def pairs_of(buffer: DBuffer, slices: NeighborSlices) -> Pairs:
        layer.wait(slices.ready)
        buffer.gathered.materialize()
        return list(zip(buffer.gathered.raw, slices.flats, strict=True))

    def finish() -> None:  # after the collective, which reads the slices on another stream
        for buffer in buffers:
            buffer.neighbor = None

    with layer.on(stream, after):
        try:
            pairs = [pair for both in zip(buffers, kept, strict=True) for pair in pairs_of(*both)]
        except BaseException as error:
            _give_back(buffers, error)
            raise
        handle = Handle(f"all_gather of {what}", buffers, group)
        return handle.launch(lambda: transport_of(group, choice).all_gather(pairs, what), finish)


def _give_back(buffers: Sequence[DBuffer], error: BaseException) -> None:
    """Free gathered memory where some of it cannot be had: nothing was sent, so nothing else writes there."""
    for buffer in buffers:
        buffer.release()
    error.add_note(f"all_gather of {_label(buffers)} could not start")


class ReduceScatter:
    """Reduce-scatter of buffers' gathered memory over the shard axis; each rank's shard gets its slice.

    Each rank sends (N-1)/N of its gathered memory, in its dtype. Buffers with a reduction form send N-1 rows in that
    form by an all-to-all, summed in fp32. The gathered memory is overwritten. Padding of the shard is zero afterwards.

    Args:
        buffers: on one mesh and device.
        op: "avg" or "sum" over the ranks of the shard axis. Integers have no average.
        divide: with "sum": divide the sum by this, in the shard's dtype.
        transport: for this reduction. Defaults to the buffers'.
        group: process group of the shard axis's ranks to reduce in, so that gathers and reductions overlap. Defaults to
            the axis's.

    Raises:
        ValueError: as for `Gather`; an unknown op, `divide` with "avg" or not positive, a dtype that cannot be reduced,
            or a group of other ranks.
    """

    def __init__(
        self,
        buffers: Sequence[DBuffer],
        op: Op = "avg",
        divide: float | None = None,
        transport: TransportChoice | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._buffers = _checked(buffers, "reduce_scatter")
        _check_reduction(buffers, op, divide)
        for buffer in buffers:
            if not buffer.gathered.flats:
                raise ValueError(
                    f"{buffer.name}: a reduction does not apply, since the wire form keeps gathered tensors elsewhere"
                )
        self._choice = buffers[0].transport if transport is None else resolved(transport)
        self._group = (
            buffers[0].mesh_view.group if group is None else _same_ranks(group, buffers[0].mesh_view.group)
        )
        self._op: Op = op
        self._scale = 1.0 if divide is None else 1.0 / divide
        self._label = _label(buffers)
        self._title = f"reduce_scatter of {self._label}"
        self._size = buffers[0].mesh_view.size
        self._transport: Transport | None = None
        self._exchange = _exchange(buffers) if self._size > 1 else None
        self._accumulate = False  # in the reduction under way

    def start(self, *, accumulate: bool = False, stream: Any = None, after: Events | None = None) -> Handle:
        """Start reducing.

        Args:
            accumulate: add to the shard instead of replacing it.

        Raises:
            ValueError: `accumulate` with shard and gathered memory that are the same.
            RuntimeError: a buffer is released or has a collective under way, or the collective could not start.
        """
        for buffer in self._buffers:
            if buffer.in_flight is not None or not buffer.gathered.present:
                buffer.check_idle("reduce_scatter")
                buffer.check_gathered("reduce_scatter")
            if accumulate and buffer.aliased:
                raise ValueError(
                    f"{buffer.name}: with one rank and one dtype shard and gathered memory are one, so nothing can be "
                    "accumulated into it; add gradients into the views, or build the buffer with alias=False"
                )
        self._accumulate = accumulate
        with self._buffers[0].layer.on(stream, after):
            if self._exchange is not None:
                self._exchange.encode()
            handle = Handle(self._title, self._buffers, self._group)
            return handle.launch(self._send, self._store)

    def _send(self) -> Work | None:
        """Reduce into the shards if dtype and device allow it, else into this rank's slices of the gathered memory."""
        if self._size == 1:
            return None
        if self._transport is None:
            self._transport = transport_of(self._group, self._choice)
        if self._exchange is not None:
            return self._exchange.start(self._transport, self._label)
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for buffer in self._buffers:
            straight = not (self._accumulate or buffer.casts or buffer.offloaded)
            receive = buffer.shard_memory.flats if straight else buffer.gathered.own
            pairs += zip(receive, buffer.gathered.raw, strict=True)
        return self._transport.reduce_scatter(pairs, self._op, self._label)

    def _store(self) -> None:
        """Write the results that are not in the shards yet, scaled."""
        accumulate, scale, size = self._accumulate, self._scale, self._size
        if self._exchange is None:
            for buffer in self._buffers:
                straight = not (accumulate or buffer.casts or buffer.offloaded) and (
                    size > 1 or buffer.aliased
                )
                _store(buffer, buffer.gathered.own, straight, accumulate, scale)
            return
        into_shard = [
            not (accumulate or buffer.offloaded) and buffer.dtype == torch.float32 for buffer in self._buffers
        ]
        sums = self._exchange.sums(into_shard)
        for buffer, straight, own in zip(self._buffers, into_shard, sums, strict=True):
            _store(buffer, own, straight, accumulate, scale / size if self._op == "avg" else scale)


def _store(buffer: DBuffer, own: Flats, straight: bool, accumulate: bool, scale: float) -> None:
    """Write the reduced slice to the shard with at most one kernel, and zero its padding."""
    if buffer.offloaded:
        _store_offloaded(buffer, own, accumulate, scale)
        return
    shard = buffer.shard_memory.flats
    if accumulate:
        compat.add(shard, own, alpha=scale)
    elif straight:
        if scale != 1.0:
            compat.scale(shard, scale)
    elif scale != 1.0:
        compat.copy_scaled(shard, own, scale)
    else:
        compat.copy(shard, own)
    if buffer.shard_memory.gaps:
        compat.zero(buffer.shard_memory.gaps)


def _store_offloaded(buffer: DBuffer, own: Flats, accumulate: bool, scale: float) -> None:
    """Copy the reduced slice to a shard on the CPU; an addition there needs it at once."""
    shard = buffer.shard_memory.flats
    gathered = buffer.gathered
    gaps = gathered.own_gaps if own is gathered.own else buffer.geometry.gaps_in(own)
    compat.zero(gaps)  # before the copy, which may run later
    if scale != 1.0:
        compat.scale(own, scale)
    if accumulate:
        compat.add(shard, [flat.to(buffer.shard_device) for flat in own])
    else:
        compat.copy(shard, own, non_blocking=True)


class AllReduce:
    """All-reduce of buffers' shards over the replicate axis, in place, in the shards' dtype.

    Each rank sends 2 (R-1)/R of its shards for R replicas.

    Args:
        buffers: on one mesh and device, of one dtype.
        op: as for `ReduceScatter`, over the replicas.

    Raises:
        ValueError: the mesh has no replicate axis, or as for `ReduceScatter`.
    """

    def __init__(self, buffers: Sequence[DBuffer], op: Op = "avg") -> None:
        self._buffers = _checked(buffers, "all_reduce")
        _check_reduction(buffers, op, None)
        first = buffers[0]
        if first.mesh_view.replica_group is None:
            raise ValueError(
                f"{first.name}: all_reduce needs a replicate axis; build the buffer with replicate_dim="
            )
        if len({buffer.dtype for buffer in buffers}) > 1:
            raise ValueError(
                f"all_reduce of several buffers needs one dtype, found {[(m.name, m.dtype) for m in buffers]}; "
                "call it once for each dtype"
            )
        self._op: Op = op

    def start(self, *, stream: Any = None, after: Events | None = None) -> Handle:
        """Start reducing.

        Raises:
            RuntimeError: a buffer has a collective under way, or the collective could not start.
        """
        for buffer in self._buffers:
            buffer.check_idle("all_reduce")
            buffer.check_shard("all_reduce")
        first = self._buffers[0]
        flats = [flat for buffer in self._buffers for flat in buffer.shard_memory.flats]
        reduced = flats

        def start() -> Work | None:
            group = first.mesh_view.replica_group
            if group is None or first.mesh_view.num_replicas == 1:
                return None
            return transport_of(group, first.transport).all_reduce(reduced, self._op, _label(self._buffers))

        def finish() -> None:
            if first.offloaded:
                compat.copy(flats, reduced, non_blocking=True)

        with first.layer.on(stream, after):
            if first.offloaded:
                reduced = [flat.to(first.device) for flat in flats]
            handle = Handle(
                f"all_reduce of {_label(self._buffers)}", self._buffers, first.mesh_view.replica_group
            )
            return handle.launch(start, finish)


def _same_ranks(group: dist.ProcessGroup, shards: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group, which must have the ranks of the shard axis in the same order."""
    ranks, expected = dist.get_process_group_ranks(group), dist.get_process_group_ranks(shards)
    if ranks != expected:
        raise ValueError(f"group has ranks {ranks}, the shard axis {expected}; both must be the same")
    return group


def _exchange(buffers: Sequence[DBuffer]) -> Exchange | None:
    """The exchange of buffers with a reduction form, or None for buffers without."""
    having = [buffer for buffer in buffers if buffer.reduction is not None]
    if having and len(having) < len(buffers):
        raise ValueError(
            f"reduce_scatter: of {[buffer.name for buffer in buffers]} only some have a reduction form; "
            "call it once for those with one, and once for the others"
        )
    form = buffers[0].reduction
    return None if form is None else form.exchange(buffers)


def _label(buffers: Sequence[DBuffer]) -> str:
    return ", ".join(buffer.name for buffer in buffers)


def _checked(buffers: Sequence[DBuffer], what: str) -> list[DBuffer]:
    if not buffers or len({id(buffer) for buffer in buffers}) != len(buffers):
        raise ValueError(f"{what} needs at least one buffer, each once; got {[m.name for m in buffers]}")
    first = buffers[0]
    for buffer in buffers:
        same = buffer.mesh_view == first.mesh_view and buffer.transport == first.transport
        if not same or buffer.layer.device != first.layer.device:
            raise ValueError(
                f"{what}: {buffer.name} is on {buffer.layer.device} and {buffer.mesh_view.mesh}, "
                f"{first.name} on {first.layer.device} and {first.mesh_view.mesh}; "
                "one call takes buffers of one mesh, device and transport"
            )
    return list(buffers)


def _check_reduction(buffers: Sequence[DBuffer], op: str, divide: float | None) -> None:
    if op not in ("avg", "sum"):
        raise ValueError(f"op is {op!r}; expected 'avg' or 'sum'")
    if divide is not None and (op != "sum" or not divide > 0):
        raise ValueError(
            f"divide={divide} with op={op!r}: it divides a sum by a positive number; use op='sum'"
        )
    for buffer in buffers:
        if buffer.coded:
            raise ValueError(
                f"{buffer.name}: a reduction does not apply to codes at rest; copy values into `local_views`"
            )
        dtype = buffer.full_dtype
        if not dtype.is_floating_point and (op == "avg" or divide is not None):
            raise ValueError(
                f"{buffer.name}: an average of {dtype} is not {dtype}; use op='sum' without divide"
            )
        if dtype.is_floating_point and dtype.itemsize == 1:
            raise ValueError(f"{buffer.name}: {dtype} cannot be added up; reduce in a wider full_dtype")
