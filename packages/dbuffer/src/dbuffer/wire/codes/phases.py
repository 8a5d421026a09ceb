"""Gathers that move only the codes that a phase computes with.

Products sum along rows of a weight in forward and along its columns in backward. Where the elements that share a scale
are those of a sum (MXFP8), each direction has separate codes:

    shard  --quantize-->  rows     codes, scales    --gather for forward-->    views of rows
           --quantize-->  columns  codes, scales    --gather for backward-->   views of columns
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ...memory.gathered import Flats, GatheredMemory
from ...memory.geometry import Geometry
from ...memory.recycler import Recycler
from ..blocks import BlockFormat
from ..form import Encoder, Pairs
from .on_wire import BlockEncoder, BlocksOnWire


@dataclass(frozen=True)
class PhasesOnWire(BlocksOnWire):
    """Gather the codes of one format for forward, and those of another for backward. Gathered tensors stay codes.

    `row_bytes` of each format are cached on a rank until the shard changes; a gather moves those that
    `DBuffer.choose_codes` chose.

    Args:
        backward: format of the codes that are gathered for backward.

    Raises:
        ValueError: a format rounds stochastically, or `read_back`: values do not show which codes they are from.
    """

    backward: BlockFormat = field(kw_only=True)
    read_back: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.read_back or self.backward.needs_noise:
            raise ValueError(f"{self}: codes for backward are rounded to nearest, and not read back")

    def encoder(self, geometry: Geometry, gathered: GatheredMemory, recycler: Recycler) -> "PhasedEncoder":
        """An encoder that caches both codes. Raises ValueError as that of `BlocksOnWire`."""
        columns = self._encoder_of(self.backward, geometry, gathered, recycler)
        views = gathered.views
        rows = self._encoder_of(self.format, geometry, gathered, recycler)  # last: the buffer shows its views
        return PhasedEncoder(rows, columns, views)


class PhasedEncoder(Encoder):
    """Encoder of `PhasesOnWire` for one buffer.

    Attributes:
        rows: encoder of the codes for forward.
        columns: encoder of the codes for backward.
        column_views: a `BlockQuantizedTensor` of the codes for backward for each of the layout's tensors.
        moved: whose codes gathers move; at first those for forward.
    """

    def __init__(
        self, rows: BlockEncoder, columns: BlockEncoder, column_views: Mapping[str, torch.Tensor]
    ) -> None:
        self.rows, self.columns, self.column_views = rows, columns, column_views
        self.moved: Sequence[BlockEncoder] = (rows,)

    def choose(self, rows: bool, columns: bool) -> None:
        """Say whose codes the next gathers move."""
        self.moved = (self.rows,) * rows + (self.columns,) * columns

    def encode(self, shards: Flats) -> Pairs:
        """Quantize the shards if they have changed, in each chosen format."""
        return [pair for encoder in self.moved for pair in encoder.encode(shards)]

    def decode(self) -> bool:
        """Copy the scales of each tensor together."""
        for encoder in self.moved:
            encoder.decode()
        return False

    def retire(self) -> None:
        """Never use the memory of either again."""
        self.rows.retire()
        self.columns.retire()

    def keep_for(self, group: dist.ProcessGroup | None) -> None:
        """Raise ValueError: slices that forward leaves are not what backward gathers."""
        if group is not None:
            raise ValueError("codes for forward are not kept for backward, which gathers others")

    def release(self) -> None:
        """Free the codes."""
        self.rows.release()
        self.columns.release()

    def forget(self) -> None:
        """Quantize again at the next gather."""
        self.rows.forget()
        self.columns.forget()
