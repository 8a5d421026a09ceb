"""Four-bit codes, two a byte, with a scale of one byte for each block of a row, and an fp32 scale above those.

A row's codes are self-contained, except its fp32 scales, which are largest magnitudes:

    | two codes a byte, low half first: ceil(columns / 2) | one byte a block: ceil(columns / size) |

    value = level[code] * block scale          block scale = a function of its byte and the magnitude above it
"""

import functools
from typing import ClassVar

import torch

from ..blocks import BlockFormat
from ..kernels import codec, launch
from ..kernels.codec import Scratch
from ..noise import Noise
from ..tiles import Bands, RowRun, Runs


class PairFormat(BlockFormat):
    """Base of formats of four bits; a subclass has a block's `size`, and says what the bytes of blocks are.

    Attributes:
        form: name of the format in the kernels.
        levels: numbers that the 16 codes stand for.
        middles: codes are counts of these that a number, or for `signed` its magnitude, exceeds.
        signed: whether a code's highest bit is a sign.
        zero: a code that stands for 0.
    """

    form: ClassVar[int]
    levels: ClassVar[tuple[float, ...]]
    middles: ClassVar[tuple[float, ...]]
    signed: ClassVar[bool]
    zero: ClassVar[int]

    @property
    def size(self) -> int:
        """Elements of a block."""
        raise NotImplementedError

    def block_bytes(self, largest: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
        """Bytes of blocks, in fp32 or uint8, from their largest magnitudes and the magnitudes above them."""
        raise NotImplementedError

    def block_scales(self, bytes_: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
        """Scales of blocks, fp32, from their bytes, uint8, and the magnitudes above them."""
        raise NotImplementedError

    def reciprocals(self, bytes_: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
        """fp32 factors that scale values to the range of the codes; NaN where the magnitude above is NaN."""
        raise NotImplementedError

    @property
    def _group(self) -> int:
        """Blocks of a row that share an fp32 scale; 0: all blocks of a matrix do."""
        return 0 if self.tile[0] > 1 else self.tile[1] // self.size

    def code_bytes(self, columns: int) -> int:
        """Two codes a byte, then one byte a block."""
        return -(-columns // 2) + -(-columns // self.size)

    def _quantize(
        self,
        runs: Runs,
        values: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        amax: torch.Tensor | None,
        noise: Noise | None,
    ) -> None:
        if amax is None:
            self.amax(runs, values, scales)
            amax = scales
        if launch.writes_pairs(self.size, values.device):
            middles = _numbers(self.middles, values.device)
            launch.write_pairs(self, self._group, middles, runs, values, codes, scales, amax)
            return
        scratch = Scratch(values.device)
        for run in runs:
            groups = codec.tiles_of(amax, run)
            groups = groups.masked_fill(~groups.isfinite(), torch.nan)
            for chunk in codec.chunks(run):
                source = codec.rows_of(values, run.values, run, chunk).view(-1, run.grid.columns)
                self._encode(
                    source, self._above(groups, run, chunk), self._code_rows(codes, run, chunk), scratch
                )
            codec.tiles_of(scales, run).copy_(groups)

    def _dequantize(self, runs: Runs, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        if launch.reads_pairs(out.device):
            levels = _numbers(self.levels, out.device)
            launch.read_pairs(self, self._group, levels, runs, codes, scales, out)
            return
        scratch = Scratch(out.device)
        pairs = _pairs(self.levels, out.device)
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
                self._multiply(x, self.block_scales(rows[:, half:], self._above(groups, run, chunk)))
                codec.rows_of(out, run.values, run, chunk).view(-1, columns).copy_(x)

    def sum(self, runs: Runs, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Raises ValueError: four bits are for weights, not for contributions to a sum."""
        raise ValueError(f"{self} serves weights, not reductions; use BlockInt8 for gradients")

    def _above(self, groups: torch.Tensor, run: RowRun, chunk: Bands) -> torch.Tensor:
        """The magnitude above each block: (rows, blocks)."""
        blocks = -(-run.grid.columns // self.size)
        above = groups[chunk.band : chunk.band + chunk.bands].repeat_interleave(chunk.height, dim=0)
        return above.repeat_interleave(min(self._group or blocks, blocks), dim=1)[:, :blocks]

    def _code_rows(self, codes: torch.Tensor, run: RowRun, chunk: Bands) -> torch.Tensor:
        width, rows = self.code_bytes(run.grid.columns), chunk.bands * chunk.height
        return codes.narrow(0, run.codes + chunk.row * width, rows * width).view(rows, width)

    def _multiply(self, x: torch.Tensor, factors: torch.Tensor) -> None:
        """Multiply rows (n, columns) by a factor a block (n, blocks)."""
        full = x.shape[1] // self.size
        if full:
            x[:, : full * self.size].unflatten(1, (full, self.size)).mul_(factors[:, :full, None])
        x[:, full * self.size :].mul_(factors[:, full:])

    def _encode(self, values: torch.Tensor, above: torch.Tensor, out: torch.Tensor, scratch: Scratch) -> None:
        """Write rows of codes and bytes of blocks, for the magnitude above each block."""
        rows, columns = values.shape
        half = -(-columns // 2)
        padded = scratch.take(rows * 2 * half).view(rows, 2 * half)
        padded[:, columns:] = 0.0
        x = padded[:, :columns].copy_(values)
        largest = torch.zeros_like(above)
        codec.reduce_rows(x.abs(), self.size, largest)
        out[:, half:].copy_(self.block_bytes(largest, above))
        self._multiply(x, self.reciprocals(out[:, half:], above))
        codes = scratch.take(padded.numel(), torch.uint8).view(rows, 2 * half)
        over = scratch.take(padded.numel(), torch.bool).view(rows, 2 * half)
        if self.signed:
            padded.nan_to_num_(0.0)
            codes.copy_(torch.signbit(padded, out=over)).mul_(8)
            padded.abs_()
        else:
            codes.zero_()
        for middle in self.middles:  # NaN, where the magnitude above is bad, exceeds none
            codes.add_(torch.gt(padded, middle, out=over).view(torch.uint8))
        torch.bitwise_or(codes[:, ::2], codes[:, 1::2] << 4, out=out[:, :half])


@functools.cache
def _pairs(levels: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """The two levels of each byte, fp32, as 64 bits."""
    bytes_ = torch.arange(256, device=device)
    numbers = _numbers(levels, device)
    return torch.stack((numbers[bytes_ & 15], numbers[bytes_ >> 4]), dim=1).view(torch.int64).view(-1)


@functools.cache
def _numbers(numbers: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, device=device)
