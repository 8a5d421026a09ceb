"""Integer codes in runs of a row: what gradients travel in.

One byte an element and four a block: 1.0156 bytes an element with blocks of 256. Rounded stochastically the code's mean
is the value, so that errors of many ranks and steps cancel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from . import blocks
from .blocks import Runs
from .noise import Noise, random_bits
from .tiles import Region, RowRun, TileGrid

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
        bytes_ = codes.view(torch.int8)
        for run in runs:
            for chunk in blocks.chunks(run):
                found = blocks.scales_in(amax, run.scales, run.grid, chunk)
                up, down = blocks.reciprocal(found, TOP, pow2=False)
                scaled = blocks.tiles_in(values, run.values, run.grid, chunk) * up
                if noise is None:
                    scaled.round_()
                else:
                    scaled.add_(_uniform(noise, run, chunk, scaled.device)).floor_()
                blocks.clear_bad(scaled, up)  # casting NaN to an integer would give anything
                blocks.tiles_in(bytes_, run.codes, run.grid, chunk).copy_(scaled.clamp_(-TOP, TOP))
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
    """fp32 values of integer codes times scales."""
    return codes.view(torch.int8).float().mul_(scales)


def _uniform(noise: Noise, run: RowRun, chunk: Region, device: torch.device) -> torch.Tensor:
    """Odd multiples of 2^-17 in (0, 1): their mean is 1/2, and an integer up to 127 plus one is exact in fp32."""
    bits = random_bits(noise, blocks.elements_in(run, chunk, device))
    bits.bitwise_right_shift_(15).bitwise_and_(0x1FFFE).bitwise_or_(1)
    return bits.float().mul_(2.0**-17)
