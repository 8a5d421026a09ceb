"""e4m3 codes in 2-D tiles.

One byte an element and four a tile: 1.00024 bytes an element with tiles of 128x128, 1.0039 with 32x32. Tiles that are
square transpose exactly, so one plane of codes serves a matrix and its transpose. With power-of-two scales a value that
is read back as bf16 is exact; fp32 scales use the range fully but round a second time.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from ..blocks import BlockFormat
from ..kernels.codec import Scratch
from ..noise import Noise

TOP = 448.0  # e4m3's largest number


@dataclass(frozen=True)
class BlockFP8(BlockFormat):
    """e4m3 codes with one scale a tile.

    |value read back - value| <= max(|value| / 16, scale / 1024). A value within 4 % of fp32's largest may be read back
    as infinity.

    Args:
        tile: rows and columns that share a scale.
        scale: "pow2": a power of two. "fp32": the number that maps the tile's amax to 448.

    Raises:
        ValueError: a tile that is not two positive integers, or another kind of scale.
    """

    tile: tuple[int, int] = (128, 128)
    scale: Literal["pow2", "fp32"] = "pow2"

    def __post_init__(self) -> None:
        tile = tuple(self.tile) if isinstance(self.tile, tuple | list) else ()
        if len(tile) != 2 or any(type(size) is not int or size < 1 for size in tile):
            raise ValueError(f"BlockFP8: tile: expected (rows, columns), integers from 1, got {self.tile!r}")
        if self.scale not in ("pow2", "fp32"):
            raise ValueError(f"BlockFP8: scale: expected 'pow2' or 'fp32', got {self.scale!r}")
        object.__setattr__(self, "tile", tile)

    @property
    def coder(self) -> "E4M3":
        """e4m3, to nearest even."""
        return E4M3(self.scale != "fp32")


@dataclass(frozen=True)
class E4M3:
    """The coder of `BlockFP8`."""

    pow2: bool
    code = 0
    top = TOP

    def store(
        self, x: torch.Tensor, codes: torch.Tensor, scratch: Scratch, element: int, noise: Noise | None
    ) -> None:
        """Clamped first: beyond 448 torch gives NaN before 2.12 and 448 from then on."""
        codes.view(torch.float8_e4m3fn).copy_(x.clamp_(-TOP, TOP))

    def load(self, codes: torch.Tensor, x: torch.Tensor, scratch: Scratch) -> None:
        """A code's bits, moved up by 7, are an fp16 number of 1/256 of its value, unless it is NaN.

        torch reads fp16 many times faster than e4m3.
        """
        numel = codes.numel()
        magnitudes = torch.bitwise_and(codes, 0x7F, out=scratch.take(numel, torch.uint8))
        if int(magnitudes.max()) == 0x7F:
            x.copy_(codes.view(torch.float8_e4m3fn))
            return
        bits = scratch.take(numel, torch.int16).copy_(codes.view(torch.int8))
        bits.mul_(128).bitwise_and_(-0x4001)
        x.copy_(bits.view(torch.float16)).mul_(256.0)
