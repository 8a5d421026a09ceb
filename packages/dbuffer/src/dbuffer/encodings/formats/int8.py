"""Integer codes in runs of a row, for gradients in reductions and for weights.

One byte an element and four a block: 1.0156 bytes an element with blocks of 256. Rounded stochastically the code's mean
is the value, so that errors of many ranks and steps cancel.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from ..blocks import BlockFormat
from ..kernels.codec import Scratch
from ..noise import Noise, random_bits

TOP = 127.0


@dataclass(frozen=True)
class BlockInt8(BlockFormat):
    """Codes -127..127 with one fp32 scale for each `size` consecutive elements of a row.

    |value read back - value| <= block's amax / 254 to nearest (ties to even), amax / 127 stochastically.

    Args:
        size: elements that share a scale; a row's last block may be short.
        rounding: "nearest", or "stochastic", which takes a `Noise` at each call.

    Raises:
        ValueError: a size below 1, or another rounding.
    """

    size: int = 256
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        if type(self.size) is not int or self.size < 1:
            raise ValueError(f"BlockInt8: size: expected an integer from 1, got {self.size!r}")
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(
                f"BlockInt8: rounding: expected 'nearest' or 'stochastic', got {self.rounding!r}"
            )

    @property
    def tile(self) -> tuple[int, int]:
        """One row of `size` columns."""
        return (1, self.size)

    @property
    def needs_noise(self) -> bool:
        """Whether codes are rounded stochastically."""
        return self.rounding == "stochastic"

    @property
    def coder(self) -> "Int8":
        """Integers."""
        return Int8()


@dataclass(frozen=True)
class Int8:
    """The coder of `BlockInt8`."""

    code = 1
    top = TOP
    pow2 = False

    def store(
        self, x: torch.Tensor, codes: torch.Tensor, scratch: Scratch, element: int, noise: Noise | None
    ) -> None:
        """Rounds to nearest, or x + u down, u an odd multiple of 2^-17 in (0, 1).

        The mean of u is 1/2, and an integer up to 127 plus u is exact in fp32, so integers stay.
        """
        if noise is None:
            x.round_()
        else:
            bits = random_bits(noise, element, scratch.take(2 * x.numel(), torch.int32))
            bits.bitwise_right_shift_(15).bitwise_and_(0x1FFFE).bitwise_or_(1)
            x.add_(bits, alpha=2.0**-17).floor_()
        codes.view(torch.int8).copy_(x.clamp_(-TOP, TOP))

    def load(self, codes: torch.Tensor, x: torch.Tensor, scratch: Scratch) -> None:
        """The integers."""
        x.copy_(codes.view(torch.int8))
