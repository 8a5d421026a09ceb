"""8-bit codes for the moments: which numbers they stand for, and the nearest code of a number.

A block's numbers are multiplied by the reciprocal of its scale, the largest of them (over `top`), and each product gets
the nearest code; one that lies in the middle between two goes to the larger magnitude.

    "root"      floating-point steps with 5 bits of mantissa, F(c), shifted down towards zero, so that they are even
                near zero and grow in proportion further up.
                First moment: a sign and v(c) = F(c) - F(0), c = 0..127.
                Second moment: its ROOT, v(c) = F(c) - F(-1), c = 0..255: no zero, the smallest is a floor.
    "dynamic"   bitsandbytes' signed and unsigned dynamic maps, the second moment itself; up to 50 % near the small end,
                where the second moment becomes zero.

The arithmetic is integer arithmetic on the bits of fp32 numbers, so that torch and Triton give the same codes:

    code = (bits(x) + half a step) >> (23 - mantissa bits), less an offset
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

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
        """Added to a number's bits: half a step, less the offset; the code is then what is left of the shift."""
        return (1 << (self.shift - 1)) - (self.offset << self.shift)

    def value(self, code: int) -> float:
        """F(code)."""
        return torch.tensor(self.offset + code << self.shift, dtype=torch.int32).view(torch.float32).item()


FIRST, SECOND = Steps(5, 127), Steps(5, 255)
FIRST_ZERO, SECOND_ZERO = FIRST.value(0), SECOND.value(-1)

SCALE_MIN, SCALE_MAX = 1e-30, 1e37  # of a block of zeros; below which squares stay finite


@dataclass
class Buffer:
    """A scratch of fp32 numbers, and the views of it that a stretch of blocks needs; all share memory."""

    values: torch.Tensor  # 1-D, whole tiles
    bits: torch.Tensor  # the same as int32
    tiles: torch.Tensor  # values as (bands, rows, columns, columns)
    inner: torch.Tensor  # of values: what is in memory, in its shape
    inner_bits: torch.Tensor
    padding: list[torch.Tensor]  # of values: the rest of short tiles


class RootMap:
    """The default map. `spares` of its methods are buffers whose content is lost."""

    name = "root"
    stores_root = True
    first_top = 1.0 - FIRST_ZERO
    second_top = 1.0 - SECOND_ZERO

    def kernel_tables(self, device: torch.device) -> list[torch.Tensor]:
        """The six tables that the Triton kernels take, unused here."""
        numbers, table = torch.zeros(1, device=device), torch.zeros(1, dtype=torch.int32, device=device)
        return [numbers, table, table, numbers, table, table]

    def kernel_constants(self) -> dict[str, Any]:
        """The constants that the Triton kernels take."""
        return {
            "ROOT_MAP": True,
            "FIRST_SHIFT": FIRST.shift,
            "FIRST_OFFSET": FIRST.offset,
            "FIRST_ZERO": FIRST_ZERO,
            "FIRST_INVERSE_TOP": 1 / self.first_top,
            "SECOND_SHIFT": SECOND.shift,
            "SECOND_OFFSET": SECOND.offset,
            "SECOND_ZERO": SECOND_ZERO,
            "SECOND_INVERSE_TOP": 1 / self.second_top,
            **dict.fromkeys(("FIRST_LOW", "SECOND_LOW", "HIGH", "KEY_SHIFT", "ZERO_CODE", "CELLS"), 0),
        }

    def decode_first(self, codes: torch.Tensor, out: Buffer, spares: list[Buffer]) -> None:
        """Numbers in ±first_top from the codes of a stretch."""
        sign = spares[0].bits
        out.inner_bits.copy_(codes)
        torch.bitwise_and(out.bits, 128, out=sign)
        sign.bitwise_left_shift_(24)
        out.bits.bitwise_and_(127).add_(FIRST.offset).bitwise_left_shift_(FIRST.shift)
        out.values.sub_(FIRST_ZERO)
        out.bits.bitwise_or_(sign)

    def encode_first(self, values: Buffer, codes: torch.Tensor, spares: list[Buffer]) -> None:
        """Codes of numbers in ±first_top, which are lost."""
        sign, bits = spares[0].bits, values.bits
        torch.bitwise_right_shift(bits, 24, out=sign)
        sign.bitwise_and_(128)
        values.values.abs_().add_(FIRST_ZERO)
        bits.add_(FIRST.rounding).bitwise_right_shift_(FIRST.shift).clamp_(0, FIRST.last).bitwise_or_(sign)
        codes.copy_(values.inner_bits)

    def decode_second(self, codes: torch.Tensor, out: Buffer, spares: list[Buffer]) -> None:
        """Numbers in (0, second_top] from the codes of a stretch."""
        out.inner_bits.copy_(codes)
        out.bits.add_(SECOND.offset).bitwise_left_shift_(SECOND.shift)
        out.values.sub_(SECOND_ZERO)

    def encode_second(self, values: Buffer, codes: torch.Tensor, spares: list[Buffer]) -> None:
        """Codes of numbers in [0, second_top], which are lost."""
        values.values.add_(SECOND_ZERO)
        values.bits.add_(SECOND.rounding).bitwise_right_shift_(SECOND.shift).clamp_(0, SECOND.last)
        codes.copy_(values.inner_bits)


def dynamic_values(signed: bool) -> list[float]:
    """bitsandbytes' dynamic map of 8 bits: seven decades, each with twice the steps of the one below; sorted.

    Within decade 10^(i-6) the steps are the midpoints of 2^i (unsigned: 2^(i+1)) equal intervals of [0.1, 1].
    """
    found = [0.0, 1.0]
    for i in range(7):
        parts = 2**i if signed else 2 ** (i + 1)
        ends = torch.linspace(0.1, 1, parts + 1, dtype=torch.float32)
        steps = ((ends[:-1] + ends[1:]) / 2 * 10.0 ** (i - 6)).tolist()
        found += steps
        if signed:
            found += [-step for step in steps]
    return sorted(found)


KEY_SHIFT = 16  # a key is the sign-less bits above: exponent and 7 bits of mantissa


class Table:
    """The nearest of some numbers by look-up: a key from the top bits, one comparison with the bound in the key's cell.

    For one sign: ``magnitudes`` ascending from 0. A cell holds at most one bound, which is checked here.
    """

    def __init__(self, magnitudes: list[float]) -> None:
        exact = torch.tensor(magnitudes, dtype=torch.float64)
        middles = (exact[:-1] + exact[1:]) / 2
        # The largest fp32 number that is still nearer to the smaller neighbour (a tie goes to the larger).
        nearest = middles.to(torch.float32)
        below = torch.nextafter(nearest, torch.zeros_like(nearest))
        self.bounds = torch.where(nearest.double() >= middles, below, nearest)
        bits = self.bounds.view(torch.int32)
        self.low = int(bits[0]) >> KEY_SHIFT
        self.high = 127 << (23 - KEY_SHIFT)  # the cell of 1.0 and what rounding puts just above
        cells = torch.arange(self.low, self.high + 1, dtype=torch.int32)
        index = torch.searchsorted(bits >> KEY_SHIFT, cells, right=False)
        after = torch.searchsorted(bits >> KEY_SHIFT, cells, right=True)
        assert int((after - index).max()) <= 1, "two bounds in one cell"
        self.base = index.to(torch.int32)
        padded = torch.cat([bits, torch.tensor([0x7FFFFFFF], dtype=torch.int32)])
        self.limit = padded[index]


class DynamicMap:
    """bitsandbytes' maps, for states that compare with its own."""

    name = "dynamic"
    stores_root = False
    first_top = 1.0
    second_top = 1.0

    def __init__(self, device: torch.device) -> None:
        signed, unsigned = dynamic_values(True), dynamic_values(False)
        self.zero = signed.index(0.0)
        positive, negative = Table(signed[self.zero :]), Table([-x for x in signed[self.zero :: -1]])
        assert positive.low == negative.low
        self.low, self.high = positive.low, positive.high
        self.cells = self.high - self.low + 1
        self.first_values = torch.tensor(signed, dtype=torch.float32, device=device)
        self.first_base = torch.cat([positive.base, negative.base]).to(device)
        self.first_limit = torch.cat([positive.limit, negative.limit]).to(device)
        table = Table(unsigned)
        self.second_low = table.low
        self.second_values = torch.tensor(unsigned, dtype=torch.float32, device=device)
        self.second_base, self.second_limit = table.base.to(device), table.limit.to(device)

    def kernel_tables(self, device: torch.device) -> list[torch.Tensor]:
        """The six tables that the Triton kernels take."""
        tables = [self.first_values, self.first_base, self.first_limit]
        return [*tables, self.second_values, self.second_base, self.second_limit]

    def kernel_constants(self) -> dict[str, Any]:
        """The constants that the Triton kernels take."""
        return {
            "ROOT_MAP": False,
            **dict.fromkeys(("FIRST_SHIFT", "FIRST_OFFSET", "SECOND_SHIFT", "SECOND_OFFSET"), 0),
            **dict.fromkeys(("FIRST_ZERO", "SECOND_ZERO"), 0.0),
            **dict.fromkeys(("FIRST_INVERSE_TOP", "SECOND_INVERSE_TOP"), 1.0),
            "FIRST_LOW": self.low,
            "SECOND_LOW": self.second_low,
            "HIGH": self.high,
            "KEY_SHIFT": KEY_SHIFT,
            "ZERO_CODE": self.zero,
            "CELLS": self.cells,
        }

    def decode_first(self, codes: torch.Tensor, out: Buffer, spares: list[Buffer]) -> None:
        """Numbers in [-0.993, 1] from the codes of a stretch."""
        self._decode(codes, out, spares[0], self.first_values)

    def decode_second(self, codes: torch.Tensor, out: Buffer, spares: list[Buffer]) -> None:
        """Numbers in [0, 1] from the codes of a stretch."""
        self._decode(codes, out, spares[0], self.second_values)

    @staticmethod
    def _decode(codes: torch.Tensor, out: Buffer, spare: Buffer, values: torch.Tensor) -> None:
        if out.padding:
            spare.bits.zero_()
        spare.inner_bits.copy_(codes)
        torch.index_select(values, 0, spare.bits, out=out.values)

    def encode_first(self, values: Buffer, codes: torch.Tensor, spares: list[Buffer]) -> None:
        """Codes of numbers in [-1, 1], which are lost."""
        sign, key, base, limit = (spare.bits for spare in spares[:4])
        torch.bitwise_right_shift(values.bits, 31, out=sign)  # 0 or -1
        values.bits.bitwise_and_(0x7FFFFFFF)
        self._key(values, key, self.low)
        torch.bitwise_and(sign, self.cells, out=base)
        key.add_(base)
        torch.index_select(self.first_base, 0, key, out=base)
        self._add_one_above(values, self.first_limit, key, base, limit)
        values.bits.copy_(base).bitwise_xor_(sign).sub_(sign).add_(self.zero)
        codes.copy_(values.inner_bits)

    def encode_second(self, values: Buffer, codes: torch.Tensor, spares: list[Buffer]) -> None:
        """Codes of numbers in [0, 1], which are lost."""
        key, base, limit = (spare.bits for spare in spares[:3])
        self._key(values, key, self.second_low)
        torch.index_select(self.second_base, 0, key, out=base)
        self._add_one_above(values, self.second_limit, key, base, limit)
        values.bits.copy_(base)
        codes.copy_(values.inner_bits)

    def _key(self, values: Buffer, key: torch.Tensor, low: int) -> None:
        torch.bitwise_right_shift(values.bits, KEY_SHIFT, out=key)
        key.clamp_(low, self.high).sub_(low)

    @staticmethod
    def _add_one_above(
        values: Buffer, limits: torch.Tensor, key: torch.Tensor, base: torch.Tensor, limit: torch.Tensor
    ) -> None:
        """base += values > limits[key]; by bits, which order positive numbers as they are. ``key`` is lost."""
        torch.index_select(limits, 0, key, out=limit)
        torch.sub(limit, values.bits, out=key)
        base.sub_(key.bitwise_right_shift_(31))


@functools.cache
def map_of(name: str, device: torch.device) -> RootMap | DynamicMap:
    """A state map by its name.

    Raises:
        ValueError: no such map.
    """
    if name == "root":
        return RootMap()
    if name == "dynamic":
        return DynamicMap(device)
    raise ValueError(f"state_map={name!r}: expected 'root' or 'dynamic'")
