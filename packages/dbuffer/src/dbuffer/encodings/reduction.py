"""Encoded reductions: one row for each rank, sent by an all-to-all and summed by the receiver.

    gathered   |  for rank 0  |  for rank 1  |  for rank 2  |      on each rank
                   encode: a cast, or codes and their scales
    sent       |    row 0     |    row 1     |    row 2     |      one all-to-all
    received   | from rank 0  | from rank 1  | from rank 2  |
                   sum in fp32, in the order of the ranks
    shard      |      S       |

One collective moves the rows of all buffers:

    row for rank r   | of buffer a | of buffer b | ...

Each contribution is encoded once, this rank's too; sums are not sent, and codes are never added. So the result does not
depend on which rank holds an element, and is the same in every run.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from .. import _torch_compat as compat
from .._buffer import DBuffer
from ..memory.gathered import Flats, GatheredMemory
from ..memory.geometry import Geometry
from ..memory.recycler import Scratch
from ..transport import Transport, Work
from .formats import VALUES, BlockFormat
from .noise import Noise
from .rows import CodeRows, aligned

_SUMMED = (torch.float32, torch.bfloat16)


class InRows:
    """Base of the reduction forms: each rank sends one row to each other rank, by one all-to-all.

    `form.reducer(geometry, gathered, (begin, width))` encodes and sums one buffer, whose bytes begin at `begin` in rows
    of `width` bytes. Rows are uint8, (ranks, bytes), contiguous, each on a 16-byte boundary.

        encode(rows, noise)    writes the rows, row r for rank r; noise differs in each reduction and on each rank
        sum_rows(rows, sums)   sums received rows in fp32, in rank order; `shard_size` elements a segment
    """

    def exchange(self, buffers: Sequence[DBuffer]) -> "_RowExchange":
        """The all-to-all of a reduction of several buffers."""
        return _RowExchange(buffers)

    def scratch_bytes(self, buffers: "Sequence[tuple[Any, Geometry, torch.dtype]]") -> int:
        """Bytes of the receive and the send buffer of one reduction."""
        nbytes: int = sum(
            form.row_bytes(geometry, dtype) * geometry.layout.world_size for form, geometry, dtype in buffers
        )
        return 2 * nbytes if _encode(buffers) else nbytes


def _encode(buffers: "Sequence[tuple[Any, Geometry, torch.dtype]]") -> bool:
    """Whether rows are encoded; else the gathered memory of the only buffer is sent."""
    form, geometry, dtype = buffers[0]
    return len(buffers) > 1 or form.encodes(geometry, dtype)


@dataclass(frozen=True)
class CastReduction(InRows):
    """Contributions are sent in `dtype` and summed in fp32.

    Against a reduce-scatter in bf16, which rounds every partial sum: the same bytes, and of a mean over 64 ranks .13 %
    of rounding error instead of .91 %.

    Args:
        dtype: torch.bfloat16 or torch.float32. None: the gathered dtype.
    """

    dtype: torch.dtype | None = torch.bfloat16

    def __post_init__(self) -> None:
        if self.dtype not in (None, *_SUMMED):
            raise ValueError(
                f"CastReduction: dtype {self.dtype}; expected torch.bfloat16, torch.float32 or None"
            )

    def check(self, gathered: torch.dtype) -> None:
        """Accepts fp32 and bf16: fp16 has three bits more than bf16, fp64 more than the sums."""
        if gathered not in _SUMMED:
            raise ValueError(
                f"gradients in {gathered} cannot travel as {self.dtype or gathered} and be summed in fp32; reduce in "
                "torch.float32 or torch.bfloat16 (MixedPrecisionPolicy(reduce_dtype=...))"
            )

    def row_bytes(self, geometry: Geometry, gathered: torch.dtype) -> int:
        """Bytes of a shard in the payload's dtype."""
        itemsize = (self.dtype or gathered).itemsize
        return sum(aligned(segment.shard_size * itemsize) for segment in geometry.layout.segments)

    def encodes(self, geometry: Geometry, gathered: torch.dtype) -> bool:
        """False for one segment already in the payload's dtype."""
        segments = geometry.layout.segments
        return self.dtype not in (None, gathered) or len(segments) > 1

    def reducer(self, geometry: Geometry, gathered: GatheredMemory, place: tuple[int, int]) -> "_Cast":
        """A reducer that casts, or sends the gathered memory."""
        return _Cast(self.dtype or gathered.dtype, geometry, gathered.raw, place[0])


class _Cast:
    """One kernel a segment; to sum, one a rank and segment."""

    def __init__(self, dtype: torch.dtype, geometry: Geometry, raw: Flats, begin: int) -> None:
        self._dtype, self._begin = dtype, begin
        self._sizes = [segment.shard_size for segment in geometry.layout.segments]
        self._sources = [flat.view(geometry.layout.world_size, -1) for flat in raw]

    def encode(self, rows: torch.Tensor, noise: Noise) -> None:
        compat.copy(self._planes(rows), self._sources)

    def sum_rows(self, rows: torch.Tensor, sums: Flats) -> None:
        planes = self._planes(rows)
        compat.copy(sums, [plane[0] for plane in planes])
        for rank in range(1, len(rows)):
            compat.add(sums, [plane[rank] for plane in planes])

    def _planes(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Each segment's elements for, or from, each rank: (ranks, shard_size)."""
        planes, begin = [], self._begin
        for size in self._sizes:
            nbytes = size * self._dtype.itemsize
            planes.append(rows[:, begin : begin + nbytes].view(self._dtype))
            begin += aligned(nbytes)
        return planes


@dataclass(frozen=True)
class BlockReduction(InRows):
    """Contributions are sent as codes and scales of blocks of each tensor; values are summed in fp32.

    The error of a mean over ranks is at most the mean of the contributions' errors; with stochastic rounding its
    expectation is zero. Random bits belong to the element, the reduction's number and the rank.

    Args:
        format: such as `BlockInt8(256, rounding="stochastic")`; the layout cuts no row, and none of its tiles.
    """

    format: BlockFormat

    def check(self, gathered: torch.dtype) -> None:
        """Accepts any dtype that the format reads."""
        if gathered not in VALUES:
            raise ValueError(
                f"gradients in {gathered} cannot be quantized by {self.format}; reduce in torch.float32"
            )

    def row_bytes(self, geometry: Geometry, gathered: torch.dtype) -> int:
        """Codes and scales of a shard."""
        return CodeRows(geometry.layout, self.format).row_bytes

    def encodes(self, geometry: Geometry, gathered: torch.dtype) -> bool:
        """Always."""
        return True

    def reducer(self, geometry: Geometry, gathered: GatheredMemory, place: tuple[int, int]) -> "_Blocks":
        """A reducer that quantizes. Raises ValueError if the layout cuts a row or a tile."""
        return _Blocks(CodeRows(geometry.layout, self.format), geometry.rank, gathered.raw, place)


class _Blocks:
    """One call a segment."""

    def __init__(self, rows: CodeRows, rank: int, raw: Flats, place: tuple[int, int]) -> None:
        self._format, self._raw = rows.format, raw
        self._sent = rows.of_all(*place)
        self._received = rows.of_rank(rank, place[0])

    def encode(self, rows: torch.Tensor, noise: Noise) -> None:
        flat, noise_used = rows.view(-1), noise if self._format.needs_noise else None
        for runs, raw in zip(self._sent, self._raw, strict=True):
            self._format.quantize(runs, raw, flat, flat.view(torch.float32), noise=noise_used)

    def sum_rows(self, rows: torch.Tensor, sums: Flats) -> None:
        for runs, total in zip(self._received, sums, strict=True):
            self._format.sum(runs, rows, rows.view(torch.float32), total)


class _RowExchange:
    """The all-to-all of one reduction of several buffers, with the memory that it takes.

    From `encode` to the end of `sums` it holds the receive buffer, and the send buffer if rows are encoded.
    """

    def __init__(self, buffers: Sequence[DBuffer]) -> None:
        self._buffers = buffers
        forms: list[Any] = [(b.reduction, b.geometry, b.full_dtype) for b in buffers]
        *begins, width = accumulate((form.row_bytes(*args) for form, *args in forms), initial=0)
        self._reducers: list[_Cast | _Blocks] = [
            form.reducer(geometry, buffer.gathered, (begin, width))
            for buffer, (form, geometry, _), begin in zip(buffers, forms, begins, strict=True)
        ]
        recycler, nbytes = buffers[0].recycler, buffers[0].mesh_view.size * width
        self._received = Scratch(recycler, nbytes)
        self._sent = Scratch(recycler, nbytes) if _encode(forms) else None
        self._scratch = [self._received] if self._sent is None else [self._received, self._sent]

    @cached_property
    def _sums(self) -> list[Flats]:
        # Made while gathered memory exists: torch checks it.
        return [_sums_in(buffer) for buffer in self._buffers]

    def encode(self) -> None:
        try:
            for scratch in self._scratch:
                scratch.materialize()
        except BaseException:
            self._release()
            raise
        if self._sent is not None:
            rows = self._rows(self._sent.flat)
            for buffer, reducer in zip(self._buffers, self._reducers, strict=True):
                reducer.encode(rows, _noise(buffer))

    def start(self, transport: Transport, label: str) -> Work | None:
        for buffer in self._buffers:
            buffer.scratch = self._scratch
        sent = self._buffers[0].gathered.raw[0].view(torch.uint8) if self._sent is None else self._sent.flat
        return transport.all_to_all(self._received.flat, sent, label)

    def sums(self, into_shard: Sequence[bool]) -> list[Flats]:
        rows = self._rows(self._received.flat)
        places = zip(self._buffers, self._sums, into_shard, strict=True)
        results = [buffer.shard_memory.flats if in_shard else own for buffer, own, in_shard in places]
        for buffer, reducer, sums in zip(self._buffers, self._reducers, results, strict=True):
            reducer.sum_rows(rows, sums)
            buffer.scratch = []
        self._release()
        return results

    def _release(self) -> None:
        for scratch in self._scratch:
            scratch.release()

    def _rows(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(self._buffers[0].mesh_view.size, -1)


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
