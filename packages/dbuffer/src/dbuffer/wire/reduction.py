"""What travels in a reduction: a row for each rank, in an encoding of its own, summed where it arrives.

    gathered   |  for rank 0  |  for rank 1  |  for rank 2  |      on each rank
                   encode: a cast, or codes and their scales
    sent       |    row 0     |    row 1     |    row 2     |      one all-to-all
    received   | from rank 0  | from rank 1  | from rank 2  |      what all gave to this rank
                   sum in fp32, in the order of the ranks
    shard      |      S       |

Each contribution is encoded once, this rank's own too; sums never travel, and codes are never added. So the result is
the same whichever rank holds an element, and the same in every run.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from .. import _torch_compat as compat
from ..memory.gathered import Flats, GatheredMemory
from ..memory.geometry import Geometry

_SUMMED = (torch.float32, torch.bfloat16)


class Reducer(Protocol):
    """A reduction form at work on one buffer.

    Attributes:
        row_bytes: what each rank gives to each; a multiple of 16.
        rows: the gathered memory as rows, uint8 of shape (ranks, row_bytes), where it can travel as it is; else None.
    """

    row_bytes: int
    rows: torch.Tensor | None

    def encode(self, rows: torch.Tensor) -> None:
        """Write what travels.

        Args:
            rows: uint8, of shape (ranks, row_bytes), row by row contiguous and on 16-byte boundaries.
        """
        ...

    def sum_rows(self, rows: torch.Tensor, sums: Flats) -> None:
        """Add up what arrived, in the order of the ranks; padding may become anything.

        Args:
            rows: as for `encode`, row r from rank r.
            sums: fp32, 1-D, `shard_size` elements, one a segment; overwritten.
        """
        ...


class ReductionForm(Protocol):
    """How gathered gradients become a shard of their sum."""

    def check(self, gathered: torch.dtype) -> None:
        """Raise ValueError where gathered memory of this dtype cannot be reduced so."""
        ...

    def row_bytes(self, geometry: Geometry, gathered: torch.dtype) -> int:
        """What each rank gives to each other one, in bytes: a multiple of 16."""
        ...

    def encodes(self, geometry: Geometry, gathered: torch.dtype) -> bool:
        """Whether rows are written, rather than gathered memory sent as it is."""
        ...

    def reducer(self, geometry: Geometry, gathered: GatheredMemory) -> Reducer:
        """The object that serves one buffer."""
        ...


@dataclass(frozen=True)
class CastReduction:
    """Each contribution travels in `dtype`; sums are taken in fp32.

    Against a reduce-scatter in bf16, which rounds every partial sum: the same bytes, and of a mean over 64 ranks .13 %
    of rounding error instead of .91 %.

    Args:
        dtype: torch.bfloat16 or torch.float32. None: the gathered memory's.
    """

    dtype: torch.dtype | None = torch.bfloat16

    def __post_init__(self) -> None:
        if self.dtype not in (None, *_SUMMED):
            raise ValueError(
                f"CastReduction: dtype {self.dtype}; expected torch.bfloat16, torch.float32 or None"
            )

    def check(self, gathered: torch.dtype) -> None:
        """Gradients are fp32 or bf16: fp16 has three bits more than bf16, fp64 more than the sums."""
        if gathered not in _SUMMED:
            raise ValueError(
                f"gradients in {gathered} cannot travel as {self.dtype or gathered} and be summed in fp32; reduce in "
                "torch.float32 or torch.bfloat16 (MixedPrecisionPolicy(reduce_dtype=...))"
            )

    def row_bytes(self, geometry: Geometry, gathered: torch.dtype) -> int:
        """A shard in the dtype that travels."""
        itemsize = (self.dtype or gathered).itemsize
        return sum(_padded(segment.shard_size * itemsize) for segment in geometry.layout.segments)

    def encodes(self, geometry: Geometry, gathered: torch.dtype) -> bool:
        """Unless it is one segment of the dtype that travels."""
        segments = geometry.layout.segments
        return self.dtype not in (None, gathered) or len(segments) > 1

    def reducer(self, geometry: Geometry, gathered: GatheredMemory) -> Reducer:
        """One that casts, or sends the gathered memory itself."""
        return _Cast(self, geometry, gathered)


class _Cast:
    def __init__(self, form: CastReduction, geometry: Geometry, gathered: GatheredMemory) -> None:
        dtype = gathered.raw[0].dtype
        self.row_bytes = form.row_bytes(geometry, dtype)
        self._dtype = form.dtype or dtype
        self._sizes = [segment.shard_size for segment in geometry.layout.segments]
        self._sources = [
            raw.view(geometry.layout.world_size, size)
            for raw, size in zip(gathered.raw, self._sizes, strict=True)
        ]
        self.rows = None if form.encodes(geometry, dtype) else self._sources[0].view(torch.uint8)

    def encode(self, rows: torch.Tensor) -> None:
        """One kernel a segment."""
        compat.copy(self._planes(rows), self._sources)

    def sum_rows(self, rows: torch.Tensor, sums: Flats) -> None:
        """One kernel a rank and segment."""
        planes = self._planes(rows)
        compat.copy(sums, [plane[0] for plane in planes])
        for rank in range(1, len(rows)):
            compat.add(sums, [plane[rank] for plane in planes])

    def _planes(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """A segment's elements for, or from, each rank, of shape (ranks, shard_size)."""
        planes, begin = [], 0
        for size in self._sizes:
            nbytes = size * self._dtype.itemsize
            planes.append(rows[:, begin : begin + nbytes].view(self._dtype))
            begin += _padded(nbytes)
        return planes


def _padded(nbytes: int) -> int:
    return -(-nbytes // 16) * 16
