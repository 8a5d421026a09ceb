"""Four-bit codes for weights at rest, with 8-bit scales.

A row's codes are self-contained but for one fp32 scale for each group of 256 blocks (16384 columns with blocks of 64):

    | two codes a byte, low half first: ceil(columns / 2) | one byte a block: ceil(columns / size) |

    value = level[code] * block scale          block scale = group's amax * (byte / 255)^2

0.5 + 1/64 + 4/min(columns, 16384) bytes an element: 0.517 with 4096 columns, at most 0.56 from 91 columns on.
The levels are the 16 quantiles of a normal distribution that QLoRA (arXiv 2305.14314, appendix E) lists. There, a
second scale serves 256 blocks over several rows, taken from their mean; here groups stay within a row, so that any cut
between rows leaves codes as they are.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from . import blocks
from .blocks import Runs
from .noise import Noise
from .tiles import RowRun, TileGrid

GROUP = 256  # blocks that share an fp32 scale
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
    0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
MIDDLES = tuple((low + high) / 2 for low, high in itertools.pairwise(LEVELS))
ZERO = 7  # the code of level 0


@dataclass(frozen=True)
class BlockNF4:
    """16 levels with an 8-bit scale for each `size` consecutive elements of a row, and an fp32 scale for 256 of those.

    |value read back - value| <= 0.152 block scales, half of the widest step; a block scale is at least the block's
    amax, and at most (1/255 + 2 sqrt(amax / group's amax)) / 255 of the group's amax above it.

    Args:
        size: elements of a block, even; a row's last block may be short.

    Raises:
        ValueError: a size that is not an even integer from 2.
    """

    size: int = 64

    def __post_init__(self) -> None:
        if type(self.size) is not int or self.size < 2 or self.size % 2:
            raise ValueError(f"BlockNF4: size: expected an even integer from 2, got {self.size!r}")

    @property
    def tile(self) -> tuple[int, int]:
        """What shares an fp32 scale: one row of 256 blocks."""
        return (1, GROUP * self.size)

    @property
    def shares_amax(self) -> bool:
        """No: a cut between rows cuts no group."""
        return False

    @property
    def needs_noise(self) -> bool:
        """No: codes are rounded to nearest."""
        return False

    def grid(self, shape: Sequence[int]) -> TileGrid:
        """The groups of a tensor."""
        return TileGrid(tuple(shape), self.tile)

    def code_bytes(self, columns: int) -> int:
        """Two codes a byte, then one byte a block."""
        return -(-columns // 2) + -(-columns // self.size)

    def amax(self, runs: Runs, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write the largest magnitude of each group, as `BlockFormat.amax`."""
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
        for run in runs:
            for first, count in self._row_chunks(run):
                found = self._rows(values, run.values, run.grid.columns, first, count)
                group = self._rows(amax, run.scales, run.grid.across, first, count)
                group = torch.where(group.isfinite(), group, torch.nan)
                out = self._rows(codes, run.codes, self.code_bytes(run.grid.columns), first, count)
                self._encode(found, group, out)
                self._rows(scales, run.scales, run.grid.across, first, count).copy_(group)

    def dequantize(self, runs: Runs, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Write values, as `BlockFormat.dequantize`."""
        blocks.check(self, runs, codes=codes, scales=scales, values=out)
        for run in runs:
            for first, count in self._row_chunks(run):
                self._rows(out, run.values, run.grid.columns, first, count).copy_(
                    self._decode_rows(run, codes, scales, first, count)
                )

    def sum(self, runs: Runs, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Raise ValueError: four bits are for weights at rest, not for contributions to a sum."""
        raise ValueError(f"{self} serves weights, not reductions; use BlockInt8 for gradients")

    def _row_chunks(self, run: RowRun) -> list[tuple[int, int]]:
        """(first row, counted from the run's first; rows)."""
        rows = run.stop - run.start
        if not run.grid.columns:
            return []
        step = max(1, blocks.CHUNK // run.grid.columns)
        return [(first, min(step, rows - first)) for first in range(0, rows, step)]

    @staticmethod
    def _rows(flat: torch.Tensor, start: int, width: int, first: int, count: int) -> torch.Tensor:
        return flat.narrow(0, start + first * width, count * width).view(count, width)

    def _padded(self, columns: int) -> int:
        return -(-columns // self.size) * self.size

    def _encode(self, values: torch.Tensor, group: torch.Tensor, out: torch.Tensor) -> None:
        """Write rows of codes and block bytes, given the groups' amax."""
        count, columns = values.shape
        x = values.new_zeros((count, self._padded(columns)), dtype=torch.float32)
        x[:, :columns].copy_(values)
        x = x.view(count, -1, self.size)
        groups = group.repeat_interleave(GROUP, dim=1)[:, : x.shape[1]]
        bytes_ = (x.abs().amax(dim=2) / groups).sqrt_().mul_(255.0).ceil_().clamp_(max=255.0)
        bytes_.nan_to_num_(0.0)  # a group of zeros, or a bad one
        scale = block_scales(bytes_, groups)
        up, _ = blocks.reciprocal(scale, 1.0, pow2=False)
        x.mul_(up.unsqueeze(2))
        found = torch.bucketize(x.view(count, -1), x.new_tensor(MIDDLES), out_int32=True)
        found.masked_fill_(up.isnan().repeat_interleave(self.size, dim=1), ZERO)
        found[:, columns:] = ZERO
        half = -(-columns // 2)
        out[:, :half].copy_((found[:, ::2] + found[:, 1::2] * 16)[:, :half])
        out[:, half:].copy_(bytes_)

    def _decode_rows(
        self, run: RowRun, codes: torch.Tensor, scales: torch.Tensor, first: int, count: int
    ) -> torch.Tensor:
        """Rows of fp32 values."""
        columns = run.grid.columns
        half = -(-columns // 2)
        packed = self._rows(codes, run.codes, self.code_bytes(columns), first, count)
        group = self._rows(scales, run.scales, run.grid.across, first, count)
        pairs = packed[:, :half]
        table = torch.tensor(LEVELS, device=codes.device)
        found = torch.stack((pairs & 15, pairs >> 4), dim=2).view(count, -1)
        values = torch.zeros(count, self._padded(columns), device=codes.device)
        values[:, :columns] = table[found[:, :columns].int()]
        groups = group.repeat_interleave(GROUP, dim=1)[:, : values.shape[1] // self.size]
        scale = block_scales(packed[:, half:].float(), groups)
        return values.view(count, -1, self.size).mul_(scale.unsqueeze(2)).view(count, -1)[:, :columns]


def block_scales(bytes_: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """fp32 scales of blocks from their bytes, as fp32, and their groups' amax."""
    return (bytes_ * bytes_).mul_(1.0 / 65025.0).mul_(groups)
