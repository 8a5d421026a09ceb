"""Gathers of quantized blocks: ranks send codes and scales, and each rank dequantizes them.

shard  --quantize, once until it changes-->  this rank's codes and scales
codes    |  S  |  S  |  S  |                 one coalesced all-gather
scales   |  s  |  s  |  s  |
gathered |  S  |  S  |  S  |                 dequantized, one call a segment
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import _torch_compat as compat
from .._encoding import Encoder, Pairs, WireForm
from ..memory.gathered import Flats, GatheredMemory
from ..memory.geometry import Geometry
from ..memory.recycler import Recycler, Scratch, hold_forever
from .blocks import VALUES, BlockFormat
from .planes import CodePlanes


@dataclass(frozen=True)
class InBlocks(WireForm):
    """Base of wire forms of one block format, with equally many bytes from each rank.

    Args:
        format: format of the codes; it must round to nearest.

    Raises:
        ValueError: the format rounds stochastically.
    """

    format: BlockFormat

    def __post_init__(self) -> None:
        if self.format.needs_noise:
            raise ValueError(
                f"{type(self).__name__}: {self.format} rounds stochastically; weights are rounded to nearest"
            )

    def dtypes(self, shard: torch.dtype, gathered: torch.dtype) -> tuple[torch.dtype, ...]:
        """uint8, for values in fp32, bf16 or fp16."""
        for dtype in (shard, gathered):
            if dtype not in VALUES:
                raise ValueError(f"{dtype} cannot be quantized by {self.format}; expected fp32, bf16 or fp16")
        return (torch.uint8,)

    def row_bytes(self, geometry: Geometry) -> int:
        """Bytes that each rank sends to each other rank."""
        return CodePlanes(geometry.layout, self.format).row_bytes


@dataclass(frozen=True)
class BlocksOnWire(InBlocks):
    """Gather codes, at most one byte an element, and a scale for each tile. All ranks compute with the same values.

    Codes and scales are equal to whole tensors', for any number of ranks. They are cached until the shard changes
    (its version counter, or `DBuffer.forget_encoding`), which takes `row_bytes`.

    Args:
        format: format of the codes; it must round to nearest.
    """

    def encoder(self, geometry: Geometry, gathered: GatheredMemory, recycler: Recycler) -> Encoder:
        """An encoder that caches its codes.

        Raises:
            ValueError: the layout cuts a row or a tile.
        """
        planes = CodePlanes(geometry.layout, self.format)
        return BlockEncoder(planes, geometry.rank, gathered, recycler)


class BlockDecoder(Encoder):
    """Receives the codes and scales of all ranks and dequantizes them: half of an encoder.

    Attributes:
        scratch: receive buffers, from the start of a gather until they are dequantized.
    """

    def __init__(self, planes: CodePlanes, gathered: GatheredMemory, recycler: Recycler) -> None:
        self._format = planes.format
        self._raw = gathered.raw
        self._all_runs = [planes.gathered_runs(segment) for segment in range(len(gathered.raw))]
        ranks = planes.layout.world_size
        received = [Scratch(recycler, ranks * size) for size in planes.code_bytes]
        scales = Scratch(recycler, ranks * planes.scale_bytes)
        self.scratch: Sequence[Scratch] = (*received, scales)
        self._received = [scratch.flat for scratch in received]
        self._received_scales = scales.flat.view(torch.float32)

    def materialize(self) -> None:
        """Allocate the receive buffers, for use on the current stream."""
        for scratch in self.scratch:
            scratch.materialize()

    def decode(self) -> bool:
        """Dequantize into the gathered memory and free the receive buffers."""
        for runs, codes, raw in zip(self._all_runs, self._received, self._raw, strict=True):
            self._format.dequantize(runs, codes, self._received_scales, raw)
        self.release()
        return False

    def release(self) -> None:
        """Free the receive buffers."""
        for scratch in self.scratch:
            scratch.release()

    def retire(self) -> None:
        """Never use the receive buffers again."""
        for scratch in self.scratch:
            scratch.retire()


class BlockEncoder(BlockDecoder):
    """Encoder of `BlocksOnWire` for one buffer.

    Attributes:
        codes: this rank's codes, uint8, one tensor a segment; empty before the first gather.
        scales: this rank's scales.
    """

    def __init__(self, planes: CodePlanes, rank: int, gathered: GatheredMemory, recycler: Recycler) -> None:
        super().__init__(planes, gathered, recycler)
        self._planes = planes
        self._own_runs = planes.runs(rank)
        self.codes: Flats = ()
        self.scales = torch.empty(0, device=recycler.device)
        self._pairs: Pairs = []
        self._shards: Flats = ()  # source of the codes
        self._versions: list[int] = []

    def is_stale(self, shards: Flats) -> bool:
        """Whether these shards must be quantized before a gather."""
        return shards is not self._shards or compat.versions(shards) != self._versions

    def encode(self, shards: Flats) -> Pairs:
        """Quantize the shards if they have changed."""
        if self.is_stale(shards):
            self._quantize(shards, compat.versions(shards))
        self.materialize()
        return self._pairs

    def _quantize(self, shards: Flats, versions: list[int]) -> None:
        self._allocate()
        self._shards = ()  # until all codes are written
        for runs, shard, codes in zip(self._own_runs, shards, self.codes, strict=True):
            self._format.quantize(runs, shard, codes, self.scales)
        self._shards, self._versions = shards, versions

    @torch.inference_mode(False)  # later gathers write to this memory too
    def _allocate(self) -> None:
        if self.codes:
            return
        device, planes = self._received_scales.device, self._planes
        self.scales = torch.zeros(planes.num_scales, device=device)
        codes = [torch.zeros(size, dtype=torch.uint8, device=device) for size in planes.code_bytes]
        pairs = list(zip(self._received, codes, strict=True))
        self._pairs = [*pairs, (self.scratch[-1].flat, self.scales.view(torch.uint8))]
        self.codes = tuple(codes)

    def retire(self) -> None:
        """Never use this memory again: peers may still read the codes, or write the receive buffers."""
        super().retire()
        hold_forever((*self.codes, self.scales))
        self.codes, self._pairs = (), []
        self.forget()

    def forget(self) -> None:
        """Quantize again at the next gather, for any version counters."""
        self._shards = ()
