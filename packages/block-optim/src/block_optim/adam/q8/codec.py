"""8-bit codes for the moments: which numbers they stand for, and the nearest code of a number.

A block's numbers are multiplied by the reciprocal of its scale, the largest of them over the largest code's number.
Each product gets the nearest code; a tie gets the code of the larger magnitude.

F(c) are floating-point steps with 5 bits of mantissa that end at 1.0. They are shifted down towards zero, so that they
are even near zero and grow in proportion further up:

    first moment      a sign and v(c) = F(c) - F(0), c = 0..127
    second moment     its root, v(c) = F(c) - F(-1), c = 0..255: no zero, the smallest is a floor

The arithmetic is integer arithmetic on the bits of fp32 numbers, so that torch and Triton give the same codes:

    code = (bits(x) + half a step) >> (23 - mantissa bits), less an offset
"""

from dataclasses import dataclass

import torch

from block_optim.core.tiles import Buffer
from ragged_shard.device import CPU

VERSION = 1  # saved with every state; raise it when a code or its number changes
ONE_EXPONENT = 127


@dataclass(frozen=True)
class Steps:
    """The floating-point steps from ``offset`` on; the last one is 1.0. Their bits are ``step << shift``."""

    mantissa: int
    last: int  # the code of 1.0

    @property
    def shift(self) -> int:
        """Bits below a step."""
        return 23 - self.mantissa

    @property
    def offset(self) -> int:
        """The step of code 0."""
        return (ONE_EXPONENT << self.mantissa) - self.last

    @property
    def rounding(self) -> int:
        """Added to a number's bits: half a step, less the offset; the code is the shifted result."""
        return (1 << (self.shift - 1)) - (self.offset << self.shift)

    def value(self, code: int) -> float:
        """F(code)."""
        bits = torch.tensor(self.offset + code << self.shift, dtype=torch.int32, device=CPU)
        return bits.view(torch.float32).item()


FIRST, SECOND = Steps(5, 127), Steps(5, 255)
FIRST_ZERO, SECOND_ZERO = FIRST.value(0), SECOND.value(-1)
FIRST_TOP, SECOND_TOP = 1.0 - FIRST_ZERO, 1.0 - SECOND_ZERO  # the largest numbers that codes stand for

SCALE_MIN, SCALE_MAX = 1e-30, 1e37  # of a block of zeros; below which squares stay finite


def decode_first(codes: torch.Tensor, out: Buffer, spare: Buffer) -> None:
    """Numbers in ±FIRST_TOP from the codes of a stretch; ``spare`` is overwritten."""
    sign = spare.bits
    out.inner_bits.copy_(codes)
    torch.bitwise_and(out.bits, 128, out=sign)
    sign.bitwise_left_shift_(24)
    out.bits.bitwise_and_(127).add_(FIRST.offset).bitwise_left_shift_(FIRST.shift)
    out.values.sub_(FIRST_ZERO)
    out.bits.bitwise_or_(sign)


def encode_first(values: Buffer, codes: torch.Tensor, spare: Buffer) -> None:
    """Codes of numbers in ±FIRST_TOP; both buffers are overwritten."""
    sign, bits = spare.bits, values.bits
    torch.bitwise_right_shift(bits, 24, out=sign)
    sign.bitwise_and_(128)
    values.values.abs_().add_(FIRST_ZERO)
    bits.add_(FIRST.rounding).bitwise_right_shift_(FIRST.shift).clamp_(0, FIRST.last).bitwise_or_(sign)
    codes.copy_(values.inner_bits)


def decode_second(codes: torch.Tensor, out: Buffer) -> None:
    """Numbers in (0, SECOND_TOP] from the codes of a stretch."""
    out.inner_bits.copy_(codes)
    out.bits.add_(SECOND.offset).bitwise_left_shift_(SECOND.shift)
    out.values.sub_(SECOND_ZERO)


def encode_second(values: Buffer, codes: torch.Tensor) -> None:
    """Codes of numbers in [0, SECOND_TOP], which are overwritten."""
    values.values.add_(SECOND_ZERO)
    values.bits.add_(SECOND.rounding).bitwise_right_shift_(SECOND.shift).clamp_(0, SECOND.last)
    codes.copy_(values.inner_bits)
