"""Reductions in a wire form: rows are encoded into one buffer, sent by one all-to-all, and summed on arrival.

One collective moves the rows of all buffers:

    row for rank r   | of buffer a | of buffer b | ...
"""

import zlib
from collections.abc import Sequence
from functools import cached_property

import torch

from ._buffer import DBuffer
from .memory.gathered import Flats
from .memory.geometry import Geometry
from .memory.recycler import Scratch
from .transport import Transport, Work
from .wire.noise import Noise
from .wire.reduction import Reducer, ReductionForm


class Exchange:
    """The all-to-all of one reduction of several buffers, with the memory that it takes.

    From `encode` to the end of `sums` it holds the receive buffer, and the send buffer if rows are encoded.
    """

    def __init__(self, buffers: Sequence[DBuffer]) -> None:
        self._buffers = buffers
        self._reducers: list[Reducer] = []
        self._begins: list[int] = []  # in each row
        width, encodes = 0, len(buffers) > 1
        for buffer in buffers:
            form, geometry, dtype = buffer.reduction, buffer.geometry, buffer.full_dtype
            assert form is not None
            self._reducers.append(form.reducer(geometry, buffer.gathered))
            self._begins.append(width)
            width += form.row_bytes(geometry, dtype)
            encodes = encodes or form.encodes(geometry, dtype)
        recycler, nbytes = buffers[0].recycler, buffers[0].mesh_view.size * width
        self._received = Scratch(recycler, nbytes)
        self._sent = Scratch(recycler, nbytes) if encodes else None
        self._scratch = [self._received] if self._sent is None else [self._received, self._sent]

    @cached_property
    def _sums(self) -> list[Flats]:
        # Made while gathered memory exists: torch checks it.
        return [_sums_in(buffer) for buffer in self._buffers]

    def encode(self) -> None:
        """Allocate the memory, and encode. Where there is none it is as before."""
        try:
            for scratch in self._scratch:
                scratch.materialize()
        except BaseException:
            self._release()
            raise
        if self._sent is not None:
            rows = self._rows(self._sent.flat)
            for buffer, reducer, begin in zip(self._buffers, self._reducers, self._begins, strict=True):
                reducer.encode(rows, begin, _noise(buffer))

    def start(self, transport: Transport, label: str) -> Work | None:
        """Start the all-to-all of the encoded bytes."""
        for buffer in self._buffers:
            buffer.scratch = self._scratch
        sent = self._buffers[0].gathered.raw[0].view(torch.uint8) if self._sent is None else self._sent.flat
        return transport.all_to_all(self._received.flat, sent, label)

    def sums(self, into_shard: Sequence[bool]) -> list[Flats]:
        """Sum the received rows in fp32, for each buffer into its shard if `into_shard`, else its gathered memory."""
        results: list[Flats] = []
        rows = self._rows(self._received.flat)
        for buffer, reducer, begin, own, in_shard in zip(
            self._buffers, self._reducers, self._begins, self._sums, into_shard, strict=True
        ):
            sums = buffer.shard_memory.flats if in_shard else own
            reducer.sum_rows(rows, begin, sums)
            buffer.scratch = []
            results.append(sums)
        self._release()
        return results

    def _release(self) -> None:
        for scratch in self._scratch:
            scratch.release()

    def _rows(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(self._buffers[0].mesh_view.size, -1)


def exchange_scratch_bytes(
    buffers: Sequence[tuple[ReductionForm, Geometry, torch.dtype]],
) -> int:
    """Bytes that one reduction of several buffers holds in addition to theirs: receive and send buffers.

    Args:
        buffers: (reduction form, geometry, dtype of the gathered memory) of each.
    """
    nbytes = sum(
        form.row_bytes(geometry, dtype) * geometry.layout.world_size for form, geometry, dtype in buffers
    )
    form, geometry, dtype = buffers[0]
    sends_gathered = len(buffers) == 1 and not form.encodes(geometry, dtype)
    return nbytes if sends_gathered else 2 * nbytes


def _noise(buffer: DBuffer) -> Noise:
    """Noise of this reduction of this buffer on this rank."""
    view = buffer.mesh_view
    replica = 0 if view.replica_group is None else view.replica_group.rank()
    buffer.reductions += 1
    return Noise(zlib.crc32(buffer.name.encode()), buffer.reductions, replica * view.size + view.rank)


def _sums_in(buffer: DBuffer) -> Flats:
    """Room for fp32 sums at the start of the gathered memory: two ranks' slices of two bytes an element, or more."""
    sums = []
    for raw, segment in zip(buffer.gathered.raw, buffer.geometry.layout.segments, strict=True):
        sums.append(raw.view(torch.uint8).narrow(0, 0, 4 * segment.shard_size).view(torch.float32))
    return tuple(sums)
