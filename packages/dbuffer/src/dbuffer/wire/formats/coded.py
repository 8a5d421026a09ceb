"""What all formats do alike: check their arguments, and hand the work to their coder."""

from collections.abc import Sequence

import torch

from .. import blocks
from ..blocks import BlockFormat, Runs
from ..kernels import codec
from ..kernels.codec import Coder
from ..noise import Noise
from ..tiles import TileGrid


class CodedBlocks(BlockFormat):
    """A format with one code an element and one scale a tile, unless it says otherwise."""

    @property
    def coder(self) -> Coder:
        """How numbers become codes."""
        raise NotImplementedError(f"{type(self).__name__} has no coder")

    @property
    def shares_amax(self) -> bool:
        """Whether a cut can go through a tile: one of several rows."""
        return self.tile[0] > 1

    @property
    def needs_noise(self) -> bool:
        """No: codes are rounded to nearest."""
        return False

    def grid(self, shape: Sequence[int]) -> TileGrid:
        """The tiles of a tensor."""
        return TileGrid(tuple(shape), self.tile)

    def code_bytes(self, columns: int) -> int:
        """One byte an element."""
        return columns

    def amax(self, runs: Runs, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write the largest magnitude of each tile, as `BlockFormat.amax`."""
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
        self._quantize(runs, values, codes, scales, amax, noise)

    def _quantize(
        self,
        runs: Runs,
        values: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        amax: torch.Tensor | None,
        noise: Noise | None,
    ) -> None:
        codec.quantize(self.coder, runs, values, codes, scales, amax, noise)

    def dequantize(self, runs: Runs, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Write values, as `BlockFormat.dequantize`."""
        blocks.check(self, runs, codes=codes, scales=scales, values=out)
        self._dequantize(runs, codes, scales, out)

    def _dequantize(self, runs: Runs, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        codec.dequantize(self.coder, runs, codes, scales, out)

    def sum(self, runs: Runs, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Write sums over ranks, as `BlockFormat.sum`."""
        blocks.check_ranks(self, runs, codes=codes, scales=scales, out=out)
        codec.sum_ranks(self.coder, runs, codes, scales, out)
