"""Gathers of quantized blocks: ranks send codes and scales, and each rank dequantizes them.

shard  --quantize, once until it changes-->  this rank's row of codes and scales
payload  | row | row | row |                 one all-gather
gathered |  S  |  S  |  S  |                 dequantized, one call a segment
"""

from dataclasses import dataclass

import torch

from .. import _torch_compat as compat
from .._encoding import Encoder, Pairs, WireForm
from ..memory.gathered import Flats, GatheredMemory
from ..memory.geometry import Geometry
from ..memory.recycler import Recycler, Scratch, hold_forever
from .formats import VALUES, BlockFormat
from .rows import CodeRows


@dataclass(frozen=True)
class InBlocks(WireForm):
    """Base of wire forms of one block format, with equally many bytes from each rank."""

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
        return CodeRows(geometry.layout, self.format).row_bytes


@dataclass(frozen=True)
class BlocksOnWire(InBlocks):
    """Gather codes, at most one byte an element, and a scale for each tile. All ranks compute with the same values.

    Codes and scales are equal to whole tensors', for any number of ranks. They are cached until the shard changes
    (its version counter, or `DBuffer.forget_encoding`), which takes `row_bytes`.

    Args:
        format: format of the codes. Raises ValueError if it rounds stochastically.
    """

    def encoder(self, geometry: Geometry, gathered: GatheredMemory, recycler: Recycler) -> Encoder:
        """An encoder that caches its codes. Raises ValueError if the layout cuts a row or a tile."""
        return _BlockEncoder(CodeRows(geometry.layout, self.format), geometry.rank, gathered, recycler)


class _BlockDecoder(Encoder):
    """Receives the rows of all ranks and dequantizes them: half of an encoder.

    Attributes:
        scratch: the receive buffer, from the start of a gather until it is dequantized.
    """

    def __init__(self, rows: CodeRows, gathered: GatheredMemory, recycler: Recycler) -> None:
        self._rows, self._raw = rows, gathered.raw
        self._all_runs = rows.of_all()
        self.scratch = Scratch(recycler, rows.layout.world_size * rows.row_bytes)
        self._received_scales = self.scratch.flat.view(torch.float32)

    def decode(self) -> bool:
        for runs, raw in zip(self._all_runs, self._raw, strict=True):
            self._rows.format.dequantize(runs, self.scratch.flat, self._received_scales, raw)
        self.release()
        return False

    def release(self) -> None:
        self.scratch.release()

    def retire(self) -> None:
        self.scratch.retire()


class _BlockEncoder(_BlockDecoder):
    """Encoder of `BlocksOnWire` for one buffer."""

    def __init__(self, rows: CodeRows, rank: int, gathered: GatheredMemory, recycler: Recycler) -> None:
        super().__init__(rows, gathered, recycler)
        self._own_runs = rows.of_rank(rank)
        self.codes: torch.Tensor | None = None  # this rank's row, uint8, from the first gather on
        self._shards: Flats = ()  # source of the codes
        self._versions: list[int] = []

    def encode(self, shards: Flats) -> Pairs:
        versions = compat.versions(shards)
        codes = self._allocated()
        if shards is not self._shards or versions != self._versions:
            self._shards = ()  # until all codes are written
            for runs, shard in zip(self._own_runs, shards, strict=True):
                self._rows.format.quantize(runs, shard, codes, codes.view(torch.float32))
            self._shards, self._versions = shards, versions
        self.scratch.materialize()
        return [(self.scratch.flat, codes)]

    @torch.inference_mode(False)  # later gathers write to this memory too
    def _allocated(self) -> torch.Tensor:
        if self.codes is None:
            self.codes = torch.zeros(self._rows.row_bytes, dtype=torch.uint8, device=self.scratch.flat.device)
        return self.codes

    def retire(self) -> None:
        super().retire()
        if self.codes is not None:
            hold_forever((self.codes,))  # peers may still read them
        self.codes = None
        self.forget()

    def forget(self) -> None:
        self._shards = ()
