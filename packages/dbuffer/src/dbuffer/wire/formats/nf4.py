"""NF4: four-bit codes for weights at rest, with 8-bit scales.

    value = level[code] * block scale          block scale = group's amax * (byte / 255)^2

A group is 256 blocks of a row: 16384 columns with blocks of 64. 0.5 + 1/64 + 4/min(columns, 16384) bytes an element:
0.517 with 4096 columns, at most 0.56 from 128 columns on.
The levels are the 16 quantiles of a normal distribution that QLoRA (arXiv 2305.14314, appendix E) lists. There, a
second scale serves 256 blocks over several rows, taken from their mean; here groups stay within a row, so that any cut
between rows leaves codes as they are.
"""

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..kernels import codec
from .pairs import PairFormat

GROUP = 256  # blocks that share an fp32 scale
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
    0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class BlockNF4(PairFormat):
    """16 levels with an 8-bit scale for each `size` consecutive elements of a row, and an fp32 scale for 256 of those.

    |value read back - value| <= 0.152 block scales, half of the widest step; a block scale is at least the block's
    amax, and at most (1/255 + 2 sqrt(amax / group's amax)) / 255 of the group's amax above it.

    Args:
        size: elements of a block, even; a row's last block may be short.

    Raises:
        ValueError: a size that is not an even integer from 2.
    """

    size: int = 64
    form: ClassVar[int] = 0
    levels: ClassVar[tuple[float, ...]] = LEVELS
    middles: ClassVar[tuple[float, ...]] = tuple((low + high) / 2 for low, high in itertools.pairwise(LEVELS))
    signed: ClassVar[bool] = False
    zero: ClassVar[int] = LEVELS.index(0.0)

    def __post_init__(self) -> None:
        if type(self.size) is not int or self.size < 2 or self.size % 2:
            raise ValueError(f"BlockNF4: size: expected an even integer from 2, got {self.size!r}")

    @property
    def tile(self) -> tuple[int, int]:
        """The blocks that share an fp32 scale: one row of 256."""
        return (1, GROUP * self.size)

    def block_bytes(self, largest: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
        """255ths of the root of the block's part of its group's amax, rounded up."""
        bytes_ = largest.div_(above).sqrt_().mul_(255.0).ceil_().clamp_(max=255.0)
        return bytes_.nan_to_num_(0.0)  # in a group of zeros, or a bad one

    def block_scales(self, bytes_: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
        """The byte's square of 255ths of the group's amax."""
        steps = bytes_.float()
        return steps.square_().mul_(1.0 / 65025.0).mul_(above)

    def reciprocals(self, bytes_: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
        """1 over the block's scale; 1 for 0."""
        return codec.reciprocal(self.block_scales(bytes_, above), 1.0, pow2=False)[0]
