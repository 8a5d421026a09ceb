"""Weights that are kept as codes only: the shard is this rank's codes and scales, and gathers send it.

shard    | codes |s|                 no values are kept anywhere
codes    |  S  |  S  |  S  |         one coalesced all-gather
scales   |  s  |  s  |  s  |
gathered |  S  |  S  |  S  |         dequantized, one call a segment
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch

from .._encoding import Encoder, Pairs
from ..memory.gathered import Flats, GatheredMemory
from ..memory.geometry import Geometry
from ..memory.huge_pages import SMALLEST, prefer_huge_pages
from ..memory.recycler import Recycler, ShardMemory
from .blocks import BlockFormat
from .on_wire import BlockDecoder, InBlocks
from .planes import CodePlanes
from .tensor import BlockQuantizedTensor
from .tiles import RowRun


@dataclass(frozen=True)
class BlocksAtRest(InBlocks):
    """The shard is codes and scales: `row_bytes` a rank, and as many travel. For weights that are not trained.

    Codes and scales are equal to a whole tensor's, for any number of ranks. A tensor's slice is a
    `BlockQuantizedTensor`: copying values into it quantizes them, any other change of it raises.

    Args:
        format: format of the codes; it must round to nearest.

    Raises:
        ValueError: the format rounds stochastically.
    """

    keeps_codes: ClassVar[bool] = True

    def shard_memory(self, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> ShardMemory:
        """Memory of codes and scales."""
        return CodedShard(geometry, self.format, dtype, device)

    def encoder(self, geometry: Geometry, gathered: GatheredMemory, recycler: Recycler) -> Encoder:
        """An encoder that sends the shard.

        Raises:
            ValueError: the layout cuts a row or a tile.
        """
        planes = CodePlanes(geometry.layout, self.format)
        return _ShardSender(planes, gathered, recycler)


class _ShardSender(BlockDecoder):
    """Encoder of `BlocksAtRest` for one buffer."""

    def __init__(self, planes: CodePlanes, gathered: GatheredMemory, recycler: Recycler) -> None:
        super().__init__(planes, gathered, recycler)
        self._sent: Flats = ()
        self._pairs: Pairs = []

    def encode(self, shards: Flats) -> Pairs:
        """Send the shard."""
        self.materialize()
        if shards is not self._sent:
            self._pairs = [(scratch.flat, shard) for scratch, shard in zip(self.scratch, shards, strict=True)]
            self._sent = shards
        return self._pairs


def empty_codes(
    geometry: Geometry, name: str, format: BlockFormat, dtype: torch.dtype, device: torch.device
) -> BlockQuantizedTensor:
    """Memory for the codes of this rank's slice of a tensor, uninitialised.

    Args:
        geometry: of a layout that cuts no row and no tile.
        name: name of the tensor.
        format: format of the codes.
        dtype: dtype of the values.
        device: may be meta.
    """
    local = geometry.slices[name]
    grid = format.grid(local.shape)
    start = local.first // grid.columns if local.local_numel else 0
    run = RowRun(grid, start, start + local.local_numel // grid.columns)
    codes = torch.empty(
        (run.stop - start) * format.code_bytes(grid.columns), dtype=torch.uint8, device=device
    )
    return BlockQuantizedTensor(
        codes,
        torch.empty(run.num_scales, device=device),
        format,
        run,
        local.local_shape,
        dtype,
    )


class CodedShard(ShardMemory):
    """This rank's codes and scales, in place of the values of a shard.

    Attributes:
        flats: uint8, 1-D: codes, one a segment, then the scales of all.
        views: a `BlockQuantizedTensor` for this rank's slice of each tensor.
    """

    def __init__(
        self, geometry: Geometry, format: BlockFormat, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._planes = CodePlanes(geometry.layout, format)
        super().__init__(geometry, dtype, device, False)

    def allocate(self, *, zeroed: bool = False) -> None:
        """Allocate codes and scales."""
        planes = self._planes
        sizes = (*planes.code_bytes, planes.scale_bytes)
        flats = tuple([torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes])
        for flat in flats:
            if flat.nbytes >= SMALLEST:
                prefer_huge_pages(flat)
            if zeroed:
                flat.zero_()
        scales = flats[-1].view(torch.float32)
        views: dict[str, torch.Tensor] = {}
        runs = [iter(by_segment) for by_segment in planes.runs(self._geometry.rank)]
        for index, segment in enumerate(planes.layout.segments):
            for name in segment.names:
                like = empty_codes(self._geometry, name, planes.format, self._dtype, torch.device("meta"))
                run = next(runs[index]) if like.numel() else like.run
                views[name] = like.around(
                    flats[index].narrow(0, run.codes, like.codes.numel()),
                    scales.narrow(0, run.scales, like.scales.numel()),
                )
        self.views = MappingProxyType({name: views[name] for name in self._geometry.slices})
        self.flats = flats
