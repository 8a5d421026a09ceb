"""Reductions that travel in a wire form: rows encoded into one buffer, one all-to-all, summed on arrival.

The rows of all buffers of a call travel together, so that there is one collective whatever their number:

    row for rank r   | of buffer a | of buffer b | ...
"""

import zlib
from collections.abc import Sequence
from functools import cached_property

import torch

from ._memory import BufferMemory
from .memory.gathered import Flats
from .memory.geometry import Geometry
from .memory.scratch import Scratch
from .transport import Transport, Work
from .wire import Noise, Reducer, ReductionForm


class Exchange:
    """The all-to-all of one reduction of several buffers, with the memory that it takes.

    Holds what is received, and what is sent unless gathered memory travels as it is, from `start` to the end of `sums`.
    """

    def __init__(self, memories: Sequence[BufferMemory]) -> None:
        self._memories = memories
        self._reducers = reducers = [_reducer(memory) for memory in memories]
        ranks = memories[0].spec.view.size
        recycler = memories[0].recycler
        nbytes = ranks * sum(reducer.row_bytes for reducer in reducers)
        self._received = Scratch(recycler, nbytes)
        encodes = len(reducers) > 1 or reducers[0].encodes
        self._sent = Scratch(recycler, nbytes) if encodes else None
        self._scratch = [one for one in (self._received, self._sent) if one is not None]
        widths = [reducer.row_bytes for reducer in reducers]
        self._begins = [sum(widths[:index]) for index in range(len(widths))]  # in each row

    @cached_property
    def _sums(self) -> list[Flats]:
        return [_sums_in(memory) for memory in self._memories]  # while there is gathered memory: torch looks

    def start(self, transport: Transport, label: str) -> Work:
        """Encode, and start the all-to-all."""
        for one in self._scratch:
            one.materialize()
        for memory in self._memories:
            memory.scratch = self._scratch
        if self._sent is None:
            sent = self._memories[0].gathered.raw[0].view(torch.uint8)
        else:
            sent = self._sent.flat
            rows = self._rows(sent)
            for memory, reducer, begin in zip(self._memories, self._reducers, self._begins, strict=True):
                reducer.encode(rows, begin, _noise(memory))
        return transport.all_to_all(self._received.flat, sent, label)

    def sums(self, into_shard: Sequence[bool]) -> list[Flats]:
        """Add up what arrived: a buffer's sums, fp32, in its shard where asked, else in its used-up gathered memory."""
        found: list[Flats] = []
        rows = self._rows(self._received.flat)
        for memory, reducer, begin, own, there in zip(
            self._memories, self._reducers, self._begins, self._sums, into_shard, strict=True
        ):
            sums = memory.shard.flats if there else own
            reducer.sum_rows(rows, begin, sums)
            memory.scratch = []
            found.append(sums)
        for one in self._scratch:
            one.release()
        return found

    def _rows(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(self._memories[0].spec.view.size, -1)


def exchange_scratch_bytes(
    buffers: Sequence[tuple[ReductionForm, Geometry, torch.dtype]],
) -> int:
    """What a reduction of several buffers, in one call, holds in addition to theirs: what is sent and received.

    Args:
        buffers: of each its reduction form, its geometry and the dtype of its gathered memory.
    """
    nbytes = sum(form.row_bytes(where, dtype) * where.layout.world_size for form, where, dtype in buffers)
    form, geometry, dtype = buffers[0]
    as_it_is = len(buffers) == 1 and not form.encodes(geometry, dtype)
    return nbytes if as_it_is else 2 * nbytes


def _reducer(memory: BufferMemory) -> Reducer:
    form = memory.spec.reduction
    assert form is not None
    return form.reducer(memory.geometry, memory.gathered)


def _noise(memory: BufferMemory) -> Noise:
    """Of this reduction of this buffer on this rank."""
    view = memory.spec.view
    replica = 0 if view.replica_group is None else view.replica_group.rank()
    memory.reductions += 1
    return Noise(zlib.crc32(memory.name.encode()), memory.reductions, replica * view.size + view.rank)


def _sums_in(memory: BufferMemory) -> Flats:
    """Room for fp32 sums at the start of the gathered memory: two ranks' slices of two bytes an element, or more."""
    found = []
    for raw, segment in zip(memory.gathered.raw, memory.geometry.layout.segments, strict=True):
        found.append(raw.view(torch.uint8).narrow(0, 0, 4 * segment.shard_size).view(torch.float32))
    return tuple(found)
