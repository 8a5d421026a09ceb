"""Gathers of quantized blocks: ranks send codes and scales, and each rank dequantizes them.

BlocksOnWire   shard  --quantize, once until it changes-->  this rank's row of codes and scales
BlocksAtRest   shard    | row |                 codes and scales; no values are kept anywhere

               payload  | row | row | row |     one all-gather
               gathered |  S  |  S  |  S  |     dequantized, one call a segment
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch

from .. import _torch_compat as compat
from .._encoding import Encoder, Pairs, WireForm
from ..memory.gathered import Flats, GatheredMemory
from ..memory.geometry import Geometry
from ..memory.recycler import Recycler, Scratch, ShardMemory, hold_forever
from .formats import VALUES, BlockFormat
from .rows import CodeRows
from .tensor import BlockQuantizedTensor
from .tiles import RowRun


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


class _BlockDecoder(Encoder):
    """Receives the rows of all ranks and dequantizes them: half of an encoder."""

    def __init__(self, rows: CodeRows, gathered: GatheredMemory, recycler: Recycler) -> None:
        self._rows, self._raw = rows, gathered.raw
        self._all_runs = rows.of_all()
        # the receive buffer, from the start of a gather until it is dequantized
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
