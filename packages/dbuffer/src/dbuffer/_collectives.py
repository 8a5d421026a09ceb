"""Collectives on the memory of one or several buffers, each launched as one call.

source           destination                            operation
shard            gathered                               all-gather (a cast into the own slice first, if dtypes differ)
gathered         shard                                  reduce-scatter, straight in where dtypes agree
gathered         own slice of gathered, then shard      reduce-scatter in place, then one cast or accumulate kernel
shard            shard                                  all-reduce over replicas
gathered         shard                                  with a reduction form: encode, all-to-all, sum
own slice        shard (world size 1)                   the local half of the above
neighbor slices  gathered                               all-gather among a smaller group, after `shrink`
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import _torch_compat as compat
from ._exchange import Exchange
from ._handle import Handle
from ._memory import BufferMemory
from .memory.gathered import Flats
from .transport import Op, Transport, TransportChoice, Work, resolved, transport_of

Events = Iterable[Any]


class Gather:
    """An all-gather of several buffers, checked and listed once, to be started as often as is needed."""

    def __init__(self, memories: Sequence[BufferMemory], transport: TransportChoice | None = None) -> None:
        self._memories = _checked(memories, "all_gather")
        self._choice = memories[0].spec.transport if transport is None else resolved(transport)
        self._label = _label(memories)
        self._title = f"all_gather of {self._label}"
        self._group = memories[0].spec.view.group
        self._layer = memories[0].spec.layer
        self._size = memories[0].spec.view.size
        self._decodes = any(memory.encoder.decodes for memory in memories)
        self._transport: Transport | None = None

    def start(self, stream: Any = None, after: Events | None = None) -> Handle:
        """See `dbuffer.all_gather`."""
        memories, layer = self._memories, self._layer
        shrunk = False
        for memory in memories:
            if memory.in_flight is not None:
                memory.check_idle("all_gather")
            shrunk = shrunk or memory.neighbor is not None
        if shrunk:
            return _gather_neighbors(memories, self._choice, stream, after)
        handle = Handle(self._title, memories, self._group)
        with layer.on(stream, after):
            finish = self._decode_after(layer.current_stream()) if self._decodes else None
            return handle.launch(self._encode_and_send, finish)

    def _encode_and_send(self) -> Work | None:
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for memory in self._memories:
            memory.gathered.materialize()
            if not memory.aliased:
                if not memory.shard.flats:
                    memory.check_shard("all_gather")
                pairs += memory.encoder.encode(memory.shard.flats)
        if self._size == 1:
            for receive, send in pairs:  # one rank, shard and gathered memory apart by request
                if receive.data_ptr() != send.data_ptr():
                    receive.copy_(send)
            return None
        if self._transport is None:
            self._transport = transport_of(self._group, self._choice)
        return self._transport.all_gather(pairs, self._label)

    def _decode_after(self, launched_on: Any) -> Callable[[], None]:
        layer, memories = self._layer, self._memories

        def decode() -> None:
            for memory in memories:
                if not memory.aliased and memory.encoder.decode():
                    layer.wait(layer.record(), launched_on)

        return decode


def _gather_neighbors(
    memories: Sequence[BufferMemory], choice: TransportChoice, stream: Any, after: Events | None
) -> Handle:
    """Gather what `DBuffer.shrink` left on the ranks of a smaller group."""
    kept = [memory.neighbor for memory in memories if memory.neighbor is not None]
    group = kept[0].group
    if len(kept) < len(memories) or any(one.group is not group for one in kept):
        raise ValueError(
            f"all_gather: of {[memory.name for memory in memories]} only some were shrunk, or to different groups; "
            "shrink all or none of what is gathered together"
        )
    layer = memories[0].spec.layer
    what = f"the slices that neighbors keep of {_label(memories)}"

    def start() -> Work:
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for memory, one in zip(memories, kept, strict=True):
            layer.wait(one.ready)
            memory.gathered.materialize()
            receive = memory.encoder.receive() if one.coded else memory.gathered.raw
            pairs += zip(receive, one.flats, strict=True)
        return transport_of(group, choice).all_gather(pairs, what)

    def finish() -> None:  # only now: the collective reads them on another stream
        for memory, one in zip(memories, kept, strict=True):
            memory.neighbor = None
            if one.coded:
                memory.encoder.keep_for(None)
                memory.encoder.decode()

    handle = Handle(f"all_gather of {what}", memories, group)
    with layer.on(stream, after):
        return handle.launch(start, finish)


class ReduceScatter:
    """A reduce-scatter of several buffers, checked once, to be started as often as is needed."""

    def __init__(
        self,
        memories: Sequence[BufferMemory],
        op: Op = "avg",
        divide: float | None = None,
        transport: TransportChoice | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._memories = _checked(memories, "reduce_scatter")
        _check_reduction(memories, op, divide)
        for memory in memories:
            if not memory.gathered.flats:
                raise ValueError(
                    f"{memory.name}: a reduction does not apply to tensors that are gathered as codes"
                )
        spec = memories[0].spec
        self._choice = spec.transport if transport is None else resolved(transport)
        self._group = spec.view.group if group is None else _same_ranks(group, spec.view.group)
        self._op: Op = op
        self._scale = 1.0 if divide is None else 1.0 / divide
        self._label = _label(memories)
        self._title = f"reduce_scatter of {self._label}"
        self._size = memories[0].spec.view.size
        self._transport: Transport | None = None
        self._exchange = _exchange(memories) if self._size > 1 else None

    def start(self, *, accumulate: bool = False, stream: Any = None, after: Events | None = None) -> Handle:
        """See `dbuffer.reduce_scatter`."""
        for memory in self._memories:
            if memory.in_flight is not None or not memory.gathered.present:
                memory.check_idle("reduce_scatter")
                memory.check_gathered("reduce_scatter")
            if accumulate and memory.aliased:
                raise ValueError(
                    f"{memory.name}: with one rank and one dtype shard and gathered memory are one, so nothing can be "
                    "accumulated into it; add gradients into the views, or build the buffer with alias=False"
                )
        handle = Handle(self._title, self._memories, self._group)
        with self._memories[0].spec.layer.on(stream, after):
            if self._exchange is not None:
                return handle.launch(self._exchange_rows, self._add_sums if accumulate else self._store_sums)
            if accumulate:
                return handle.launch(self._add_up, self._add)
            return handle.launch(self._replace, self._store)

    def _replace(self) -> Work | None:
        """Reduce into the shards where dtype and device allow it, else into the gathered memory's own slices."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for memory in self._memories:
            straight = not (memory.spec.casts or memory.spec.offloaded)
            pairs += zip(
                memory.shard.flats if straight else memory.gathered.own, memory.gathered.raw, strict=True
            )
        return self._send(pairs)

    def _add_up(self) -> Work | None:
        """Reduce into the gathered memory's own slices: the shards are added to."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for memory in self._memories:
            pairs += zip(memory.gathered.own, memory.gathered.raw, strict=True)
        return self._send(pairs)

    def _exchange_rows(self) -> Work:
        assert self._exchange is not None
        if self._transport is None:
            self._transport = transport_of(self._group, self._choice)
        return self._exchange.start(self._transport, self._label)

    def _store_sums(self) -> None:
        self._take_sums(False)

    def _add_sums(self) -> None:
        self._take_sums(True)

    def _take_sums(self, accumulate: bool) -> None:
        assert self._exchange is not None
        scale = self._scale / self._size if self._op == "avg" else self._scale
        straight = [
            not (accumulate or memory.spec.offloaded) and memory.spec.dtype == torch.float32
            for memory in self._memories
        ]
        for memory, there, sums in zip(self._memories, straight, self._exchange.sums(straight), strict=True):
            _store(memory, sums, there, accumulate, scale)

    def _send(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Work | None:
        if self._size == 1:
            return None
        if self._transport is None:
            self._transport = transport_of(self._group, self._choice)
        return self._transport.reduce_scatter(pairs, self._op, self._label)

    def _store(self) -> None:
        for memory in self._memories:
            straight = not (memory.spec.casts or memory.spec.offloaded) and (self._size > 1 or memory.aliased)
            _store(memory, memory.gathered.own, straight, False, self._scale)

    def _add(self) -> None:
        for memory in self._memories:
            _store(memory, memory.gathered.own, False, True, self._scale)


def _store(memory: BufferMemory, own: Flats, straight: bool, accumulate: bool, scale: float) -> None:
    """Bring the reduced slice into the shard: no kernel, or one; and zero its padding."""
    if memory.spec.offloaded:
        _store_offloaded(memory, own, accumulate, scale)
        return
    shard = memory.shard.flats
    if accumulate:
        compat.add(shard, own, alpha=scale)
    elif straight:
        if scale != 1.0:
            compat.scale(shard, scale)
    elif scale != 1.0:
        compat.copy_scaled(shard, own, scale)
    else:
        compat.copy(shard, own)
    if memory.shard.gaps:
        compat.zero(memory.shard.gaps)


def _store_offloaded(memory: BufferMemory, own: Flats, accumulate: bool, scale: float) -> None:
    """Copy the reduced slice to a shard on the CPU; an addition there needs it at once."""
    shard = memory.shard.flats
    gathered = memory.gathered
    gaps = gathered.own_gaps if own is gathered.own else memory.geometry.gaps_in(own)
    compat.zero(gaps)  # before it travels: the copy may come later
    if scale != 1.0:
        compat.scale(own, scale)
    if accumulate:
        compat.add(shard, [one.to(memory.spec.shard_device) for one in own])
    else:
        compat.copy(shard, own, non_blocking=True)


class AllReduce:
    """An all-reduce of several buffers' shards over the replicas, checked once."""

    def __init__(self, memories: Sequence[BufferMemory], op: Op = "avg", divide: float | None = None) -> None:
        self._memories = _checked(memories, "all_reduce")
        _check_reduction(memories, op, divide)
        first = memories[0]
        if first.spec.view.replica_group is None:
            raise ValueError(
                f"{first.name}: all_reduce needs a replicate axis; build the buffer with replicate_dim="
            )
        if len({memory.spec.dtype for memory in memories}) > 1:
            raise ValueError(
                f"all_reduce of several buffers needs one dtype, found {[(m.name, m.spec.dtype) for m in memories]}; "
                "call it once for each dtype"
            )
        self._op, self._divide = op, divide

    def start(self, *, stream: Any = None, after: Events | None = None) -> Handle:
        """See `dbuffer.all_reduce`."""
        for memory in self._memories:
            memory.check_idle("all_reduce")
            memory.check_shard("all_reduce")
        spec = self._memories[0].spec
        reduced: list[torch.Tensor] = []

        def start() -> Work | None:
            for memory in self._memories:
                reduced.extend(
                    flat.to(spec.layer.device) if spec.offloaded else flat for flat in memory.shard.flats
                )
            group = spec.view.replica_group
            if group is None or spec.view.num_replicas == 1:
                return None
            return transport_of(group, spec.transport).all_reduce(reduced, self._op, _label(self._memories))

        def finish() -> None:
            if self._divide is not None:
                compat.scale(reduced, 1.0 / self._divide)
            if spec.offloaded:
                flats = [flat for memory in self._memories for flat in memory.shard.flats]
                compat.copy(flats, reduced, non_blocking=True)

        handle = Handle(f"all_reduce of {_label(self._memories)}", self._memories, spec.view.replica_group)
        with spec.layer.on(stream, after):
            return handle.launch(start, finish)


def _same_ranks(group: dist.ProcessGroup, shards: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group, which must have the ranks of the shard axis in the same order."""
    found, expected = dist.get_process_group_ranks(group), dist.get_process_group_ranks(shards)
    if found != expected:
        raise ValueError(f"group has ranks {found}, the shard axis {expected}; both must be the same")
    return group


def _exchange(memories: Sequence[BufferMemory]) -> Exchange | None:
    """How buffers with a reduction form travel; None for buffers without."""
    having = [memory for memory in memories if memory.spec.reduction is not None]
    if having and len(having) < len(memories):
        raise ValueError(
            f"reduce_scatter: of {[memory.name for memory in memories]} only some have a reduction form; "
            "call it once for those with one, and once for the others"
        )
    return Exchange(memories) if having else None


def _label(memories: Sequence[BufferMemory]) -> str:
    return ", ".join(memory.name for memory in memories)


def _checked(memories: Sequence[BufferMemory], what: str) -> list[BufferMemory]:
    if not memories or len({id(memory) for memory in memories}) != len(memories):
        raise ValueError(f"{what} needs at least one buffer, each once; got {[m.name for m in memories]}")
    first = memories[0]
    for memory in memories:
        same = memory.spec.view == first.spec.view and memory.spec.transport == first.spec.transport
        if not same or memory.spec.layer.device != first.spec.layer.device:
            raise ValueError(
                f"{what}: {memory.name} is on {memory.spec.layer.device} and {memory.spec.view.mesh}, "
                f"{first.name} on {first.spec.layer.device} and {first.spec.view.mesh}; "
                "one call takes buffers of one mesh, device and transport"
            )
    return list(memories)


def _check_reduction(memories: Sequence[BufferMemory], op: str, divide: float | None) -> None:
    if op not in ("avg", "sum"):
        raise ValueError(f"op is {op!r}; expected 'avg' or 'sum'")
    if divide is not None and (op != "sum" or not divide > 0):
        raise ValueError(
            f"divide={divide} with op={op!r}: it divides a sum by a positive number; use op='sum'"
        )
    for memory in memories:
        memory.check_values("a reduction")
        dtype = memory.spec.full_dtype
        if not dtype.is_floating_point and (op == "avg" or divide is not None):
            raise ValueError(
                f"{memory.name}: an average of {dtype} is not {dtype}; use op='sum' without divide"
            )
        if dtype.is_floating_point and dtype.itemsize == 1:
            raise ValueError(f"{memory.name}: {dtype} cannot be added up; reduce in a wider full_dtype")
