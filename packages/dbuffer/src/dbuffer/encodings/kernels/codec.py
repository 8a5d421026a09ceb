"""Quantizing and reading back: by Triton kernels on CUDA for tiles that a program can hold, else by torch ops.

A format says how a number becomes a code. The torch ops work on a run in pieces of whole rows that caches hold,
copied to fp32: every op but the reduction to tiles runs over memory without gaps.
"""

from collections.abc import Iterator
from typing import Protocol

import torch

from ..noise import Noise
from ..tiles import Bands, RowRun, Runs, chunks_of
from . import launch

CHUNK = 1 << 17  # elements


class Scratch:
    """Memory for one piece, by dtype, kept for the next one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[torch.dtype, torch.Tensor] = {}

    def take(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """1-D memory with any content, the same as the last call returned for this dtype."""
        memory = self._kept.get(dtype)
        if memory is None or memory.numel() < numel:
            memory = self._kept[dtype] = torch.empty(max(numel, CHUNK), dtype=dtype, device=self._device)
        return memory[:numel]


class Coder(Protocol):
    """How scaled numbers become codes of one byte."""

    @property
    def code(self) -> int:
        """Name of the format in the kernels."""
        ...

    @property
    def top(self) -> float:
        """The largest number that has a code."""
        ...

    @property
    def pow2(self) -> bool:
        """Whether scales are powers of two."""
        ...

    def store(
        self, x: torch.Tensor, codes: torch.Tensor, scratch: Scratch, element: int, noise: Noise | None
    ) -> None:
        """Write the codes of numbers of magnitude `top` at most, up to rounding; `x` (fp32) is overwritten.

        `element` is the index of the first one; x and codes are 1-D without gaps.
        """
        ...

    def load(self, codes: torch.Tensor, x: torch.Tensor, scratch: Scratch) -> None:
        """Write the numbers of codes, in fp32."""
        ...


def chunks(run: RowRun) -> Iterator[Bands]:
    """The run in pieces of about `CHUNK` elements."""
    return chunks_of(run, CHUNK)


def rows_of(flat: torch.Tensor, start: int, run: RowRun, chunk: Bands) -> torch.Tensor:
    """The elements of a piece in a flat buffer in which the run begins at `start`, one a column."""
    columns = run.grid.columns
    return flat.narrow(0, start + chunk.row * columns, chunk.bands * chunk.height * columns)


def tiles_of(flat: torch.Tensor, run: RowRun) -> torch.Tensor:
    """The run's scales in a flat buffer, as (bands, tiles)."""
    return flat.narrow(0, run.scales, run.num_scales).view(-1, max(1, run.grid.across))


def write_amax(runs: Runs, values: torch.Tensor, out: torch.Tensor) -> None:
    """Write the largest magnitude of each tile, NaN where one is NaN, at its scale."""
    if runs and launch.has_kernels(runs[0].grid.tile, values.device):
        launch.amax(runs[0].grid.tile, runs, values, out)
        return
    scratch = Scratch(values.device)
    for run in runs:
        largest = tiles_of(out, run).zero_()
        for chunk in chunks(run):
            x = rows_of(values, run.values, run, chunk)
            x = torch.abs(x, out=scratch.take(x.numel(), x.dtype)).view(chunk.bands, chunk.height, -1)
            rows = x.amax(dim=1) if chunk.height > 1 else x[:, 0]
            reduce_rows(rows, run.grid.tile[1], largest[chunk.band : chunk.band + chunk.bands])
        largest.masked_fill_(largest.isnan(), torch.nan)  # one NaN for all bit patterns


def reduce_rows(rows: torch.Tensor, width: int, out: torch.Tensor) -> None:
    """Raise `out` (n, tiles) to the largest of each `width` columns of `rows` (n, columns)."""
    full = rows.shape[1] // width
    if full:
        largest = rows[:, : full * width].unflatten(1, (full, width)).amax(dim=2)
        torch.maximum(out[:, :full], largest, out=out[:, :full])
    if full * width < rows.shape[1]:
        largest = rows[:, full * width :].amax(dim=1, keepdim=True)
        torch.maximum(out[:, full:], largest, out=out[:, full:])


def _scale(x: torch.Tensor, chunk: Bands, factors: torch.Tensor, width: int) -> None:
    """Multiply a piece (1-D) by its tiles' factors (bands, tiles)."""
    factors = factors[chunk.band : chunk.band + chunk.bands]
    x = x.view(chunk.bands, chunk.height, -1)
    columns = x.shape[2]
    if chunk.height > 1:
        x.mul_(factors.repeat_interleave(width, dim=1)[:, None, :columns])
        return
    full = columns // width
    if full:
        x[:, 0, : full * width].unflatten(1, (full, width)).mul_(factors[:, :full, None])
    if full * width < columns:
        x[:, 0, full * width :].mul_(factors[:, full:])


def reciprocal(amax: torch.Tensor, top: float, pow2: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(factors of values, NaN where the amax is not finite; factors of codes)."""
    up = torch.full_like(amax, top).div_(amax)  # `top / amax` would round twice
    up.masked_fill_(amax == 0, 1.0).clamp_(max=torch.finfo(torch.float32).max)
    if pow2:
        up.view(torch.int32).bitwise_and_(-0x800000)
    up.masked_fill_(~amax.isfinite(), torch.nan)
    down = torch.reciprocal(up)
    return up, down.masked_fill_(down.isnan(), torch.nan)


def quantize(
    coder: Coder,
    runs: Runs,
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    noise: Noise | None,
) -> None:
    """`BlockFormat.quantize`."""
    if runs and launch.has_kernels(runs[0].grid.tile, values.device):
        launch.quantize(runs[0].grid.tile, coder, runs, values, codes, scales, noise)
        return
    write_amax(runs, values, scales)
    scratch = Scratch(values.device)
    for run in runs:
        factors = tiles_of(scales, run)
        up, down = reciprocal(factors, coder.top, coder.pow2)
        factors.copy_(down)
        bad = bool(up.isnan().any())
        for chunk in chunks(run):
            source = rows_of(values, run.values, run, chunk)
            x = scratch.take(source.numel()).copy_(source)
            _scale(x, chunk, up, run.grid.tile[1])
            if bad:
                x.nan_to_num_(0.0)  # whole tiles: their factor is NaN
            element = run.element + chunk.row * run.grid.columns
            coder.store(x, rows_of(codes, run.codes, run, chunk), scratch, element, noise)


def dequantize(
    coder: Coder, runs: Runs, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor
) -> None:
    """`BlockFormat.dequantize`."""
    if runs and launch.has_kernels(runs[0].grid.tile, out.device):
        launch.sum_ranks(runs[0].grid.tile, coder, runs, codes[None], scales[None], out)
        return
    scratch = Scratch(out.device)
    for run in runs:
        factors = tiles_of(scales, run)
        for chunk in chunks(run):
            target = rows_of(out, run.values, run, chunk)
            x = target if out.dtype == torch.float32 else scratch.take(target.numel())
            coder.load(rows_of(codes, run.codes, run, chunk), x, scratch)
            _scale(x, chunk, factors, run.grid.tile[1])
            if x is not target:
                target.copy_(x)


def sum_ranks(coder: Coder, runs: Runs, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """`BlockFormat.sum`."""
    if runs and launch.has_kernels(runs[0].grid.tile, out.device):
        launch.sum_ranks(runs[0].grid.tile, coder, runs, codes, scales, out)
        return
    scratch = Scratch(out.device)
    for run in runs:
        for chunk in chunks(run):
            total = rows_of(out, run.values, run, chunk)
            for rank, (code, scale) in enumerate(zip(codes, scales, strict=True)):
                x = scratch.take(total.numel()) if rank else total
                coder.load(rows_of(code, run.codes, run, chunk), x, scratch)
                _scale(x, chunk, tiles_of(scale, run), run.grid.tile[1])
                if rank:
                    total.add_(x)
