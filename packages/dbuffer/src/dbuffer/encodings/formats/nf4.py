"""NF4: four-bit codes for weights at rest, two a byte, with 8-bit scales.

    value = level[code] * block scale          block scale = group's amax * (byte / 255)^2

A group is 256 blocks of a row: 16384 columns with blocks of 64. 0.5 + 1/64 + 4/min(columns, 16384) bytes an element:
0.517 with 4096 columns, at most 0.56 from 128 columns on. A row's codes are self-contained, except the fp32 plane of
scales, which holds the groups' amax:

    | two codes a byte, low half first: ceil(columns / 2) | one byte a block: ceil(columns / size) |

The levels are the 16 quantiles of a normal distribution that QLoRA (arXiv 2305.14314, appendix E) lists. There, a
second scale serves 256 blocks over several rows, taken from their mean; here groups stay within a row, so that any cut
between rows leaves codes as they are.
"""

import functools
import itertools
from dataclasses import dataclass

import torch

from ..blocks import BlockFormat
from ..kernels import codec, launch
from ..kernels.codec import Scratch
from ..noise import Noise
from ..tiles import Bands, RowRun, Runs

GROUP = 256  # blocks that share an fp32 scale
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
    0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
MIDDLES = tuple(
    (low + high) / 2 for low, high in itertools.pairwise(LEVELS)
)  # a code: how many a number exceeds


@dataclass(frozen=True)
class BlockNF4(BlockFormat):
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
        """The blocks that share an fp32 scale: one row of 256."""
        return (1, GROUP * self.size)

    def code_bytes(self, columns: int) -> int:
        """Two codes a byte, then one byte a block."""
        return -(-columns // 2) + -(-columns // self.size)

    def _quantize(
        self,
        runs: Runs,
        values: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        noise: Noise | None,
    ) -> None:
        codec.write_amax(runs, values, scales)
        if launch.writes_pairs(self.size, values.device):
            middles = _numbers(MIDDLES, values.device)
            launch.write_pairs(self.size, GROUP, middles, runs, values, codes, scales)
            return
        scratch = Scratch(values.device)
        for run in runs:
            groups = codec.tiles_of(scales, run)
            groups.masked_fill_(~groups.isfinite(), torch.nan)
            for chunk in codec.chunks(run):
                source = codec.rows_of(values, run.values, run, chunk).view(-1, run.grid.columns)
                self._encode(
                    source, self._above(groups, run, chunk), self._code_rows(codes, run, chunk), scratch
                )

    def _dequantize(self, runs: Runs, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        if launch.reads_pairs(out.device):
            levels = _numbers(LEVELS, out.device)
            launch.read_pairs(self.size, GROUP, levels, runs, codes, scales, out)
            return
        scratch = Scratch(out.device)
        pairs = _pairs(out.device)
        for run in runs:
            groups, columns = codec.tiles_of(scales, run), run.grid.columns
            half = -(-columns // 2)
            for chunk in codec.chunks(run):
                rows = self._code_rows(codes, run, chunk)
                index = scratch.take(rows.shape[0] * half, torch.int32)
                index.view(-1, half).copy_(rows[:, :half])
                x = scratch.take(2 * index.numel())
                torch.index_select(pairs, 0, index, out=x.view(torch.int64))
                x = x.view(-1, 2 * half)[:, :columns]
                self._multiply(x, _block_scales(rows[:, half:], self._above(groups, run, chunk)))
                codec.rows_of(out, run.values, run, chunk).view(-1, columns).copy_(x)

    def sum(self, runs: Runs, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Raises ValueError: four bits are for weights, not for contributions to a sum."""
        raise ValueError(f"{self} is for weights, not reductions; use BlockInt8 for gradients")

    def _above(self, groups: torch.Tensor, run: RowRun, chunk: Bands) -> torch.Tensor:
        """The amax of each block's group: (rows, blocks)."""
        blocks = -(-run.grid.columns // self.size)
        above = groups[chunk.band : chunk.band + chunk.bands]
        return above.repeat_interleave(min(GROUP, blocks), dim=1)[:, :blocks]

    def _code_rows(self, codes: torch.Tensor, run: RowRun, chunk: Bands) -> torch.Tensor:
        width = self.code_bytes(run.grid.columns)
        return codes.narrow(0, run.codes + chunk.row * width, chunk.bands * width).view(chunk.bands, width)

    def _multiply(self, x: torch.Tensor, factors: torch.Tensor) -> None:
        """Multiply rows (n, columns) by a factor a block (n, blocks)."""
        full = x.shape[1] // self.size
        if full:
            x[:, : full * self.size].unflatten(1, (full, self.size)).mul_(factors[:, :full, None])
        x[:, full * self.size :].mul_(factors[:, full:])

    def _encode(self, values: torch.Tensor, above: torch.Tensor, out: torch.Tensor, scratch: Scratch) -> None:
        """Write rows of codes and bytes of blocks, for the amax of each block's group."""
        rows, columns = values.shape
        half = -(-columns // 2)
        padded = scratch.take(rows * 2 * half).view(rows, 2 * half)
        padded[:, columns:] = 0.0
        x = padded[:, :columns].copy_(values)
        largest = torch.zeros_like(above)
        codec.reduce_rows(x.abs(), self.size, largest)
        bytes_ = largest.div_(above).sqrt_().mul_(255.0).ceil_().clamp_(max=255.0)
        out[:, half:].copy_(bytes_.nan_to_num_(0.0))  # in a group of zeros, or a bad one
        scales = _block_scales(out[:, half:], above)
        self._multiply(x, codec.reciprocal(scales, 1.0, pow2=False)[0])
        codes = scratch.take(padded.numel(), torch.uint8).view(rows, 2 * half).zero_()
        over = scratch.take(padded.numel(), torch.bool).view(rows, 2 * half)
        for middle in MIDDLES:  # NaN, where the group's amax is bad, exceeds none
            codes.add_(torch.gt(padded, middle, out=over).view(torch.uint8))
        torch.bitwise_or(codes[:, ::2], codes[:, 1::2] << 4, out=out[:, :half])


def _block_scales(bytes_: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
    """Scales of blocks, fp32: the byte's square of 255ths of the group's amax."""
    return bytes_.float().square_().mul_(1.0 / 65025.0).mul_(above)


@functools.cache
def _pairs(device: torch.device) -> torch.Tensor:
    """The two levels of each byte, fp32, as 64 bits."""
    bytes_ = torch.arange(256, device=device)
    numbers = _numbers(LEVELS, device)
    return torch.stack((numbers[bytes_ & 15], numbers[bytes_ >> 4]), dim=1).view(torch.int64).view(-1)


@functools.cache
def _numbers(numbers: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=device)
