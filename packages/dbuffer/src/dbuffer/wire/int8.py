"""Integer codes in runs of a row: what gradients travel in.

One byte an element and four a block: 1.0156 bytes an element with blocks of 256. Rounded stochastically the code's mean
is the value, so that errors of many ranks and steps cancel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from . import blocks, codec
from .blocks import Runs
from .codec import Scratch
from .noise import Noise, random_bits
from .tiles import TileGrid

TOP = 127.0


@dataclass(frozen=True)
class BlockInt8:
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
    def shares_amax(self) -> bool:
        """No: a cut between rows cuts no block."""
        return False

    @property
    def needs_noise(self) -> bool:
        """Whether codes are rounded stochastically."""
        return self.rounding == "stochastic"

    def grid(self, shape: Sequence[int]) -> TileGrid:
        """The blocks of a tensor."""
        return TileGrid(tuple(shape), self.tile)

    def code_bytes(self, columns: int) -> int:
        """One byte an element."""
        return columns

    def amax(self, runs: Runs, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write the largest magnitude of each block, as `BlockFormat.amax`."""
        blocks.check(self, runs, values=values, amax=out)
        codec.write_amax(runs, values, out)

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
        codec.quantize(_Int8(), runs, values, codes, scales, amax, noise)

    def dequantize(self, runs: Runs, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Write values, as `BlockFormat.dequantize`."""
        blocks.check(self, runs, codes=codes, scales=scales, values=out)
        codec.dequantize(_Int8(), runs, codes, scales, out)

    def sum(self, runs: Runs, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Write sums over ranks, as `BlockFormat.sum`."""
        blocks.check_ranks(self, runs, codes=codes, scales=scales, out=out)
        codec.sum_ranks(_Int8(), runs, codes, scales, out)


@dataclass(frozen=True)
class _Int8:
    code = 1
    top = TOP
    pow2 = False

    def store(
        self, x: torch.Tensor, codes: torch.Tensor, scratch: Scratch, element: int, noise: Noise | None
    ) -> None:
        """To nearest, or x + u rounded down, u an odd multiple of 2^-17 in (0, 1).

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
