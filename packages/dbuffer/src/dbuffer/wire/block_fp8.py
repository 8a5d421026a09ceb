"""e4m3 codes in 2-D tiles.

One byte an element and four a tile: 1.00024 bytes an element with tiles of 128x128, 1.0039 with 32x32. Tiles that are
square transpose exactly, so one plane of codes serves a matrix and its transpose. With power-of-two scales a value that
is read back as bf16 is exact; fp32 scales use the range fully but round a second time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from . import blocks
from .blocks import Runs
from .noise import Noise
from .tiles import TileGrid

TOP = 448.0  # e4m3's largest number
_LARGE = 2.0**119  # of scales: beyond it, `_decode`'s factor would overflow


@dataclass(frozen=True)
class BlockFP8:
    """e4m3 codes with one fp32 scale a tile.

    |value read back - value| <= max(|value| / 16, tile's amax / 448 / 1024), twice the second term with "pow2".

    Args:
        tile: rows and columns that share a scale.
        scale: "pow2": a power of two. "fp32": what maps the tile's amax to 448.

    Raises:
        ValueError: a tile that is not two positive integers, or another kind of scale.
    """

    tile: tuple[int, int] = (128, 128)
    scale: Literal["pow2", "fp32"] = "pow2"

    def __post_init__(self) -> None:
        tile = tuple(self.tile)
        if len(tile) != 2 or any(type(size) is not int or size < 1 for size in tile):
            raise ValueError(f"BlockFP8: tile: expected (rows, columns), integers from 1, got {self.tile!r}")
        if self.scale not in ("pow2", "fp32"):
            raise ValueError(f"BlockFP8: scale: expected 'pow2' or 'fp32', got {self.scale!r}")
        object.__setattr__(self, "tile", tile)

    @property
    def shares_amax(self) -> bool:
        """Whether a cut can go through a tile."""
        return self.tile[0] > 1

    @property
    def needs_noise(self) -> bool:
        """No: codes are rounded to nearest even."""
        return False

    def grid(self, shape: Sequence[int]) -> TileGrid:
        """The tiles of a tensor."""
        return TileGrid(tuple(shape), self.tile)

    def code_bytes(self, columns: int) -> int:
        """One byte an element."""
        return columns

    def amax(self, runs: Runs, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write the largest magnitude of each tile, as `BlockFormat.amax`."""
        blocks.check(self, runs, values=values, amax=out)
        blocks.write_amax(runs, values, out)

    def quantize(
        self,
        runs: Runs,
        values: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        *,
        amax: torch.Tensor | None = None,
        noise: Noise | None = None,
    ) -> None:
        """Write codes and scales, as `BlockFormat.quantize`."""
        given = {} if amax is None else {"amax": amax}
        blocks.check(self, runs, values=values, codes=codes, scales=scales, **given)
        blocks.check_quantize(self, runs, amax, noise)
        if amax is None:
            blocks.write_amax(runs, values, scales)
            amax = scales
        bytes_ = codes.view(torch.float8_e4m3fn)
        for run in runs:
            for chunk in blocks.chunks(run):
                found = blocks.scales_in(amax, run.scales, run.grid, chunk)
                up, down = blocks.reciprocal(found, TOP, self.scale == "pow2")
                scaled = blocks.tiles_in(values, run.values, run.grid, chunk) * up
                blocks.tiles_in(bytes_, run.codes, run.grid, chunk).copy_(scaled.clamp_(-TOP, TOP))
                blocks.clear_bad(blocks.tiles_in(codes, run.codes, run.grid, chunk), up)
                blocks.scales_in(scales, run.scales, run.grid, chunk).copy_(down)

    def dequantize(self, runs: Runs, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Write values, as `BlockFormat.dequantize`."""
        blocks.check(self, runs, codes=codes, scales=scales, values=out)
        for run in runs:
            for chunk in blocks.chunks(run):
                scale = blocks.scales_in(scales, run.scales, run.grid, chunk)
                decoded = _decode(blocks.tiles_in(codes, run.codes, run.grid, chunk), scale)
                blocks.tiles_in(out, run.values, run.grid, chunk).copy_(decoded)

    def sum(self, runs: Runs, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Write sums over ranks, as `BlockFormat.sum`."""
        blocks.sum_ranks(self, runs, codes, scales, out, _decode)


def _decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 values of e4m3 codes times scales.

    A code's bits, moved up by 7, are an fp16 number of 1/256 of its value; torch reads fp16 many times faster than
    e4m3. Only NaN, which fp16 has elsewhere, is not.
    """
    magnitudes = codes & 0x7F
    if (magnitudes.numel() and int(magnitudes.max()) == 0x7F) or float(scales.abs().max()) > _LARGE:
        return codes.view(torch.float8_e4m3fn).float().mul_(scales)
    bits = codes.view(torch.int8).to(torch.int16).mul_(128).bitwise_and_(-0x4001)
    return bits.view(torch.float16).float().mul_(scales * 256)
