"""Values as one-byte codes and one scale a tile: what formats share, and the torch ops that serve on every device.

    values  fp32, bf16, fp16   --quantize-->   codes uint8, scales fp32   --dequantize-->   value = code * scale

Codes of a row lie together, `code_bytes(columns)` of them; scales are row-major over tiles. Both depend on the tensor
alone, not on how its rows are divided into runs of whole bands. A tile that a run cuts needs the amax of the whole
tile: `amax` of each piece, the largest of them (a MAX over the int32 bits, where NaN wins), then `quantize(amax=...)`.

A tile's scale is the reciprocal of TransformerEngine's `compute_scale_from_amax`, in fp32: top / amax, 1 for amax 0,
the largest fp32 number where that overflows; for a power of two all bits but the exponent's are cleared. A tile with a
NaN or an infinity gets the scale NaN and codes 0, so every value that is read back from it is NaN.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from .noise import Noise
from .tiles import Region, RowRun, TileGrid, regions

CHUNK = 1 << 17  # elements worked on together on CPU: what caches hold
VALUES = (torch.float32, torch.bfloat16, torch.float16)
Runs = Sequence[RowRun]


class BlockFormat(Protocol):
    """A format of quantized tiles. Frozen, hashable; communicates nothing, keeps no memory.

    Buffers are 1-D and contiguous: values in fp32, bf16 or fp16, codes in uint8, scales and amax in fp32. A run names
    where in each of them it lies; what no run covers is left alone. Empty runs are served.
    """

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        ...

    @property
    def shares_amax(self) -> bool:
        """Whether a cut between rows can go through a tile; else every run of rows is a run of whole tiles."""
        ...

    @property
    def needs_noise(self) -> bool:
        """Whether `quantize` takes random bits."""
        ...

    def grid(self, shape: Sequence[int]) -> TileGrid:
        """The tiles of a tensor."""
        ...

    def code_bytes(self, columns: int) -> int:
        """Bytes of the codes of one row."""
        ...

    def amax(self, runs: Runs, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write the largest magnitude that a run holds of each tile, NaN where one is NaN, at the run's scales."""
        ...

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
        """Write the codes and scales of the runs' rows.

        Args:
            runs: whole bands, unless `amax` is given.
            values: read only.
            codes: written.
            scales: written.
            amax: of the whole tiles, lying like the scales; may be the same memory.
            noise: for stochastic rounding, and only for it.

        Raises:
            ValueError: a run cuts a tile and there is no amax, or noise is missing or does not apply.
        """
        ...

    def dequantize(self, runs: Runs, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Write the values of the runs' rows, rounded once to the dtype of `out`."""
        ...

    def sum(self, runs: Runs, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sums over ranks, added one after another in fp32 in the order of ranks.

        Args:
            runs: as one rank's.
            codes: (ranks, bytes), every rank's codes of the same rows.
            scales: (ranks, scales).
            out: fp32.
        """
        ...


_DTYPES = {"codes": (torch.uint8,), "scales": (torch.float32,), "amax": (torch.float32,)}


def check(fmt: BlockFormat, runs: Runs, **buffers: torch.Tensor) -> None:
    """Check the buffers `values`, `codes`, `scales`, `amax` that runs are read from or written to.

    Raises:
        ValueError: another dtype, more than one dimension, gaps, several devices, or a run that reaches past an end.
    """
    device = next(iter(buffers.values())).device
    for name, buffer in buffers.items():
        wanted = _DTYPES.get(name, VALUES)
        if buffer.dtype not in wanted:
            raise ValueError(f"{name}: expected {' or '.join(map(str, wanted))}, got {buffer.dtype}")
        if buffer.dim() != 1 or not buffer.is_contiguous():
            raise ValueError(
                f"{name}: expected one dimension without gaps, got shape {tuple(buffer.shape)} with strides "
                f"{buffer.stride()}; pass a flat view"
            )
        if buffer.device != device:
            raise ValueError(f"{name}: is on {buffer.device}, another buffer on {device}")
    for run in runs:
        _check_run(fmt, run, buffers)


def _check_run(fmt: BlockFormat, run: RowRun, buffers: dict[str, torch.Tensor]) -> None:
    grid, rows = run.grid, run.stop - run.start
    what = f"rows [{run.start}, {run.stop}) of a tensor of shape {grid.shape}"
    if not 0 <= run.start <= run.stop <= grid.rows:
        raise ValueError(f"{what}: it has the rows [0, {grid.rows})")
    if grid.tile != fmt.tile:
        raise ValueError(f"{what}: its tiles are {grid.tile}, those of {fmt} are {fmt.tile}; use its `grid`")
    for name, buffer in buffers.items():
        if name == "codes":
            start, size = run.codes, rows * fmt.code_bytes(grid.columns)
        elif name == "values":
            start, size = run.values, run.numel
        else:
            start, size = run.scales, run.num_scales
        if start < 0 or start + size > buffer.numel():
            raise ValueError(
                f"{name}: {what} lie at [{start}, {start + size}), the buffer has {buffer.numel()} elements"
            )


def check_quantize(fmt: BlockFormat, runs: Runs, amax: torch.Tensor | None, noise: Noise | None) -> None:
    """Check that runs without amax cut no tile, and that there is noise where it is needed and only there."""
    if fmt.needs_noise != (noise is not None):
        raise ValueError(
            f"{fmt} {'needs noise' if fmt.needs_noise else 'rounds to nearest and takes no noise'}"
        )
    for run in runs if amax is None else ():
        if not run.grid.is_whole(run.start, run.stop):
            raise ValueError(
                f"rows [{run.start}, {run.stop}) of a tensor of shape {run.grid.shape} cut tiles of "
                f"{run.grid.tile}; pass whole bands, or the amax of whole tiles"
            )


def check_ranks(**buffers: torch.Tensor) -> None:
    """Raise ValueError unless there are (ranks, n) codes and scales without gaps, of as many ranks, at least one."""
    shapes = {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    firsts = {shape[:1] for shape in shapes.values()}
    wrong = any(len(shape) != 2 or not shape[0] for shape in shapes.values())
    if wrong or len(firsts) > 1 or not all(buffer.is_contiguous() for buffer in buffers.values()):
        raise ValueError(f"expected (ranks, n) without gaps for the same ranks, at least one; got {shapes}")


def chunks(run: RowRun) -> Iterator[Region]:
    """The run's regions in pieces of whole tiles, of about `CHUNK` elements."""
    grid = run.grid
    for region in regions(grid, run.start, run.stop):
        periods, bands, height, tiles, width = region.shape
        tile, band = height * width, height * width * tiles
        _, row, column, scale = region
        period_scales = grid.bands_per_period * grid.across
        if band * bands <= CHUNK:
            step = CHUNK // (band * bands)
            for p in range(0, periods, step):
                shape = (min(step, periods - p), bands, height, tiles, width)
                yield Region(shape, row + p * grid.period, column, scale + p * period_scales)
            continue
        step = max(1, CHUNK // tile)
        down, right = max(1, step // tiles), min(step, tiles)
        for p in range(periods):
            for b in range(0, bands, down):
                for t in range(0, tiles, right):
                    shape = (1, min(down, bands - b), height, min(right, tiles - t), width)
                    first = scale + p * period_scales + b * grid.across + t
                    yield Region(shape, row + p * grid.period + b * height, column + t * width, first)


def tiles_in(flat: torch.Tensor, start: int, grid: TileGrid, region: Region) -> torch.Tensor:
    """A region's elements in a flat buffer where the run's first row starts: (periods, bands, height, tiles, width)."""
    columns = grid.columns
    strides = (grid.period * columns, grid.tile[0] * columns, columns, grid.tile[1], 1)
    first = flat.storage_offset() + start + region.row * columns + region.column
    return flat.as_strided(region.shape, strides, first)


def scales_in(flat: torch.Tensor, start: int, grid: TileGrid, region: Region) -> torch.Tensor:
    """A region's scales, in a shape that broadcasts to `tiles_in`'s."""
    periods, bands, _, tiles, _ = region.shape
    strides = (grid.bands_per_period * grid.across, grid.across, 1, 1, 1)
    first = flat.storage_offset() + start + region.scale
    return flat.as_strided((periods, bands, 1, tiles, 1), strides, first)


def elements_in(run: RowRun, region: Region, device: torch.device) -> torch.Tensor:
    """The index of each element of a region as stochastic rounding counts it, int64, in `tiles_in`'s shape."""
    grid, columns = run.grid, run.grid.columns
    strides = (grid.period * columns, grid.tile[0] * columns, columns, grid.tile[1], 1)
    index = torch.full((), run.element + region.row * columns + region.column, device=device)
    for axis, (size, stride) in enumerate(zip(region.shape, strides, strict=True)):
        steps = torch.arange(0, size * stride, stride, device=device)
        index = index + steps.view(-1, *[1] * (4 - axis))
    return index


def write_amax(runs: Runs, values: torch.Tensor, out: torch.Tensor) -> None:
    """`BlockFormat.amax` in torch ops."""
    for run in runs:
        for chunk in chunks(run):
            found = tiles_in(values, run.values, run.grid, chunk).abs().amax(dim=(2, 4), keepdim=True)
            found = torch.where(found.isnan(), torch.nan, found)  # one NaN, whatever its bits were
            scales_in(out, run.scales, run.grid, chunk).copy_(found)


def reciprocal(amax: torch.Tensor, top: float, pow2: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(what values are multiplied by, NaN where the amax is not finite; what codes are multiplied by)."""
    up = torch.full_like(amax, top).div_(amax)  # `top / amax` would round twice
    up.masked_fill_(amax == 0, 1.0).clamp_(max=torch.finfo(torch.float32).max)
    if pow2:
        up.view(torch.int32).bitwise_and_(-0x800000)
    up.masked_fill_(~amax.isfinite(), torch.nan)
    return up, torch.reciprocal(up)


def clear_bad(codes: torch.Tensor, up: torch.Tensor) -> None:
    """Set the codes of tiles whose factor is NaN to zero."""
    bad = up.isnan()
    if bad.any():
        codes.masked_fill_(bad, 0)


def sum_ranks(
    fmt: BlockFormat,
    runs: Runs,
    codes: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    decode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """`BlockFormat.sum` in torch ops; `decode` makes new fp32 values of codes and scales."""
    check_ranks(codes=codes, scales=scales)
    check(fmt, runs, codes=codes[0], scales=scales[0], values=out)
    if out.dtype != torch.float32:
        raise ValueError(f"out: expected torch.float32, got {out.dtype}")
    for run in runs:
        for chunk in chunks(run):
            total: torch.Tensor | None = None
            for code, scale in zip(codes, scales, strict=True):
                found = decode(
                    tiles_in(code, run.codes, run.grid, chunk), scales_in(scale, run.scales, run.grid, chunk)
                )
                total = found if total is None else total.add_(found)
            assert total is not None
            tiles_in(out, run.values, run.grid, chunk).copy_(total)
