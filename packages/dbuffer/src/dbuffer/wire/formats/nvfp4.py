"""NVFP4: e2m1 codes in blocks of 16 elements of a row, with an e4m3 scale each.

    value = level[code] * block scale          block scale = byte as e4m3 * outer scale

    outer scale = amax / (448 * 6), of a matrix or of a row: the block with the amax has the byte of 448

0.5625 bytes an element, and four a matrix or a row. Codes and bytes are those of torchao's `nvfp4_quantize`, whose
per-tensor scale is the outer scale; a byte is at least e4m3's smallest normal number there too. What the fp32 plane
holds is the amax: a kernel may then write a scale where another of its programs still reads the amax.
"""

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ragged_shard import CPU

from .pairs import PairFormat

SIZE = 16
TOP = 448.0 * 6.0
SMALLEST = 2.0**-119  # an outer scale from which 1 / outer scale / byte does not overflow
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _middles() -> tuple[float, ...]:
    """Numbers above which the next magnitude is nearer; in the middle the even code is."""
    middles = [(low + high) / 2 for low, high in itertools.pairwise(_MAGNITUDES)]
    # The caller's default device and dtype do not matter: modules may be imported where they are others.
    of = torch.tensor(middles, dtype=torch.float32, device=CPU)
    below = of.nextafter(torch.zeros_like(of)).tolist()
    return tuple(below[code] if code % 2 else middles[code] for code in range(len(middles)))


@dataclass(frozen=True)
class BlockNVFP4(PairFormat):
    """Four-bit floating point numbers with an e4m3 scale for each 16 elements of a row, and an fp32 scale above.

    |value read back - value| <= the block scale, half of the widest step. A NaN or an infinity makes all NaN that
    shares its outer scale.

    Args:
        outer: what shares an outer scale: "tensor", each matrix (the last two dimensions), as others' kernels and
            files have it; ranks that cut a matrix share its amax (`BlocksOnWire(cut="shared")`). "row": each row,
            which needs nothing from other ranks, and multiplies one output of a linear layer.

    Raises:
        ValueError: another kind of outer scale.
    """

    outer: Literal["tensor", "row"] = "tensor"
    form: ClassVar[int] = 1
    levels: ClassVar[tuple[float, ...]] = tuple(
        math.copysign(magnitude, sign) for sign in (1.0, -1.0) for magnitude in _MAGNITUDES
    )
    middles: ClassVar[tuple[float, ...]] = _middles()
    signed: ClassVar[bool] = True
    zero: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if self.outer not in ("tensor", "row"):
            raise ValueError(f"BlockNVFP4: outer: expected 'tensor' or 'row', got {self.outer!r}")

    @property
    def size(self) -> int:
        """Elements of a block."""
        return SIZE

    @property
    def tile(self) -> tuple[int, int]:
        """The elements that share an outer scale: more than any matrix, or row, has."""
        return (1 << 40 if self.outer == "tensor" else 1, 1 << 30)

    def block_bytes(self, largest: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
        """e4m3 of a sixth of the block's amax, in outer scales."""
        scaled = largest.div_(6.0).div_(outer_scales(above)).clamp_(2.0**-6, 448.0)
        return scaled.nan_to_num_(0.0).to(torch.float8_e4m3fn).view(torch.uint8)

    def block_scales(self, bytes_: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
        """The byte as e4m3, times the outer scale."""
        return bytes_.contiguous().view(torch.float8_e4m3fn).float().mul_(outer_scales(above))

    def reciprocals(self, bytes_: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
        """1 over the outer scale, over the byte as e4m3."""
        return outer_scales(above).reciprocal_().div_(bytes_.contiguous().view(torch.float8_e4m3fn).float())


def outer_scales(amax: torch.Tensor) -> torch.Tensor:
    """fp32 outer scales of matrices or rows."""
    return amax.div(TOP).clamp_(min=SMALLEST)
