"""Values as codes and one scale a tile: the interface of every format, and the checks of its arguments.

    values  fp32, bf16, fp16   --quantize-->   codes uint8, scales fp32   --dequantize-->   value = code * scale

Codes of a row lie together, `code_bytes(columns)` of them; scales are row-major over tiles. Both depend on the tensor
alone, not on how its rows are divided into runs of whole bands.

A tile's scale is the reciprocal of TransformerEngine's `compute_scale_from_amax`, in fp32: top / amax, 1 for amax 0,
the largest fp32 number where that overflows; for a power of two all bits but the exponent's are cleared. A tile with a
NaN or an infinity gets the scale NaN and codes 0, so every value that is read back from it is NaN.
"""

from collections.abc import Sequence

import torch

from .kernels import codec
from .kernels.codec import Coder
from .noise import Noise
from .tiles import RowRun, Runs, TileGrid

VALUES = (torch.float32, torch.bfloat16, torch.float16)


class BlockFormat:
    """A format of quantized tiles: one code an element and one scale a tile, unless a subclass differs.

    Frozen, hashable; communicates nothing, keeps no memory. Buffers are 1-D and contiguous: values in fp32, bf16 or
    fp16, codes in uint8, scales in fp32. A run names its position in each of them; other elements do not change. Runs
    are whole bands (any method raises ValueError for a cut tile), and may be empty.
    """

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        raise NotImplementedError

    @property
    def coder(self) -> Coder:
        """How numbers become codes."""
        raise NotImplementedError(f"{type(self).__name__} has no coder")

    @property
    def needs_noise(self) -> bool:
        """Whether `quantize` takes random bits. By default codes are rounded to nearest."""
        return False

    def grid(self, shape: Sequence[int]) -> TileGrid:
        """The tiles of a tensor."""
        return TileGrid(tuple(shape), self.tile)

    def code_bytes(self, columns: int) -> int:
        """Bytes of the codes of one row."""
        return columns

    def quantize(
        self,
        runs: Runs,
        values: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        *,
        noise: Noise | None = None,
    ) -> None:
        """Write the codes and scales of the runs' rows.

        Args:
            runs: rows to quantize.
            values: read only.
            codes: written.
            scales: written.
            noise: for stochastic rounding, and only for it.

        Raises:
            ValueError: noise is missing or does not apply, a run cuts a tile, or a buffer does not fit.
        """
        if self.needs_noise != (noise is not None):
            raise ValueError(
                f"{self} {'needs noise' if self.needs_noise else 'rounds to nearest and takes no noise'}"
            )
        check(self, runs, values=values, codes=codes, scales=scales)
        self._quantize(runs, values, codes, scales, noise)

    def _quantize(
        self,
        runs: Runs,
        values: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        noise: Noise | None,
    ) -> None:
        codec.quantize(self.coder, runs, values, codes, scales, noise)

    def dequantize(self, runs: Runs, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Write the values of the runs' rows, rounded once to the dtype of `out`."""
        check(self, runs, codes=codes, scales=scales, values=out)
        self._dequantize(runs, codes, scales, out)

    def _dequantize(self, runs: Runs, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        codec.dequantize(self.coder, runs, codes, scales, out)

    def sum(self, runs: Runs, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sums over ranks, added one after another in fp32 in the order of ranks.

        Args:
            runs: as one rank's.
            codes: (ranks, bytes), every rank's codes of the same rows.
            scales: (ranks, scales).
            out: fp32.
        """
        check_ranks(self, runs, codes=codes, scales=scales, out=out)
        codec.sum_ranks(self.coder, runs, codes, scales, out)


def check(fmt: BlockFormat, runs: Runs, **buffers: torch.Tensor) -> None:
    """Check the buffers `values`, `codes`, `scales` that runs are read from or written to.

    Raises:
        ValueError: another dtype, more than one dimension, gaps, several devices, or a run that cuts a tile or reaches
            past an end.
    """
    device = next(iter(buffers.values())).device
    dtypes = {"codes": (torch.uint8,), "scales": (torch.float32,)}
    for name, buffer in buffers.items():
        wanted = dtypes.get(name, VALUES)
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
        raise ValueError(f"{what}: its tiles are {grid.tile}, {fmt} has tiles {fmt.tile}; use its `grid`")
    if not grid.is_whole(run.start, run.stop):
        raise ValueError(f"{what} cut tiles of {grid.tile}; pass whole bands")
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


def check_ranks(
    fmt: BlockFormat, runs: Runs, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor
) -> None:
    """Check the buffers of a sum: (ranks, n) codes and scales of as many ranks, at least one, and fp32 sums."""
    shapes = (tuple(codes.shape), tuple(scales.shape))
    contiguous = codes.is_contiguous() and scales.is_contiguous()
    if (
        any(len(shape) != 2 for shape in shapes)
        or not codes.shape[0] == scales.shape[0] > 0
        or not contiguous
    ):
        raise ValueError(
            f"codes, scales: expected (ranks, n) without gaps, as many ranks, at least one; got {shapes}"
        )
    if out.dtype != torch.float32:
        raise ValueError(f"out: sums are {torch.float32}, got {out.dtype}")
    check(fmt, runs, codes=codes[0], scales=scales[0], values=out)
