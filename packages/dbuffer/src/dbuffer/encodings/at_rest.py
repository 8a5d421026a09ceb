"""Weights that are kept as codes only: the shard is this rank's codes and scales, and gathers send it.

shard    | row |                     codes and scales; no values are kept anywhere
payload  | row | row | row |         one all-gather
gathered |  S  |  S  |  S  |         dequantized, one call a segment
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch

from .._encoding import Encoder, Pairs
from ..memory.gathered import Flats, GatheredMemory
from ..memory.geometry import Geometry
from ..memory.recycler import Recycler, ShardMemory
from .formats import BlockFormat
from .on_wire import InBlocks, _BlockDecoder
from .rows import CodeRows
from .tensor import BlockQuantizedTensor
from .tiles import RowRun


@dataclass(frozen=True)
class BlocksAtRest(InBlocks):
    """The shard is codes and scales: `row_bytes` a rank, and as many travel. For weights that are not trained.

    Codes and scales are equal to a whole tensor's, for any number of ranks. A tensor's slice is a
    `BlockQuantizedTensor`: copying values into it quantizes them, any other change of it raises.

    Args:
        format: format of the codes. Raises ValueError if it rounds stochastically.
    """

    keeps_codes: ClassVar[bool] = True

    def shard_memory(self, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> ShardMemory:
        """Memory of codes and scales."""
        return _CodedShard(geometry, CodeRows(geometry.layout, self.format), dtype, device)

    def encoder(self, geometry: Geometry, gathered: GatheredMemory, recycler: Recycler) -> Encoder:
        """An encoder that sends the shard. Raises ValueError if the layout cuts a row or a tile."""
        return _ShardSender(CodeRows(geometry.layout, self.format), gathered, recycler)


class _ShardSender(_BlockDecoder):
    """Encoder of `BlocksAtRest` for one buffer."""

    def encode(self, shards: Flats) -> Pairs:
        self.scratch.materialize()
        return [(self.scratch.flat, shards[0])]


def empty_codes(
    geometry: Geometry, name: str, format: BlockFormat, dtype: torch.dtype, device: torch.device
) -> BlockQuantizedTensor:
    """Memory for the codes of this rank's slice of a tensor, uninitialised.

    Args:
        geometry: of a layout that cuts no row and no tile.
        dtype: dtype of the values.
        device: may be meta.
    """
    local = geometry.slices[name]
    grid = format.grid(local.shape)
    start = local.first // grid.columns if local.local_numel else 0
    run = RowRun(grid, start, start + local.local_numel // grid.columns)
    code_bytes = (run.stop - start) * format.code_bytes(grid.columns)
    codes = torch.empty(code_bytes, dtype=torch.uint8, device=device)
    scales = torch.empty(run.num_scales, device=device)
    return BlockQuantizedTensor(codes, scales, format, run, local.local_shape, dtype)


class _CodedShard(ShardMemory):
    """This rank's codes and scales, in place of the values of a shard.

    Attributes:
        flats: uint8, 1-D: this rank's row of codes and scales.
        views: a `BlockQuantizedTensor` for this rank's slice of each tensor.
    """

    def __init__(self, geometry: Geometry, rows: CodeRows, dtype: torch.dtype, device: torch.device) -> None:
        self._rows = rows
        super().__init__(geometry, dtype, device, False)

    def allocate(self, *, zeroed: bool = False) -> None:
        rows = self._rows
        flat = self._flat(rows.row_bytes, torch.uint8, zeroed)
        scales = flat.view(torch.float32)
        views: dict[str, torch.Tensor] = {}
        for segment, runs in zip(rows.layout.segments, rows.of_rank(self._geometry.rank), strict=True):
            remaining = iter(runs)
            for name in segment.names:
                like = empty_codes(self._geometry, name, rows.format, self._dtype, torch.device("meta"))
                run = next(remaining) if like.numel() else like.run
                codes = flat.narrow(0, run.codes, like.codes.numel())
                views[name] = like.around(codes, scales.narrow(0, run.scales, like.scales.numel()))
        self.views = MappingProxyType({name: views[name] for name in self._geometry.slices})
        self.flats = (flat,)
