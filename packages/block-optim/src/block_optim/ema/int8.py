"""Averages in 8 bits: a code for each element and an fp32 scale for each block, on the blocks of AdamW8bit's states.

    average = code * scale, code = -127 .. 127         code -128: NaN, also for averages that are infinite
    scale   = largest magnitude in the block / 127

An update decodes a block, moves it towards the weights in fp32, and rounds it at random to the new scale's codes, with
bits that belong to an element's global index.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from block_optim.core.grid import ScaleLayout, block_for, scale_layout
from block_optim.core.params import Param
from block_optim.core.rounding import Rounder
from block_optim.core.scratch import chunk_on
from block_optim.core.tiles import Buffer, Stretch, TileScratch, stretches_of

LEAST_NUMEL = 4096  # elements of the global tensor; smaller tensors, and vectors, are averaged in fp32
_TOP, _NAN = 127, -128
_LEAST_SCALE = torch.finfo(torch.float32).tiny


def is_coded(param: Param) -> bool:
    """Whether an int8 EMA keeps codes for the parameter, by its global shape."""
    return len(param.shape) > 1 and param.numel >= LEAST_NUMEL


def layout_of(param: Param) -> ScaleLayout:
    """The blocks of a parameter on this rank.

    Raises:
        ValueError: a rank's elements begin inside a block; the same on all ranks.
    """
    try:
        return scale_layout(param, block_for(param))
    except ValueError as error:
        raise ValueError(f"{error}; or average in bf16 or fp32") from None


@dataclass(frozen=True)
class _Tiles:
    """A matrix of tiles, and where it begins in its global tensor."""

    weight: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor  # one for each tile
    stretch: Stretch
    first: int


class CodedAverages:
    """Updates, and decodes, the averages of some parameters of one device; good for as long as all memory stays.

    Args:
        params: the parameters.
        codes: of this rank's elements: int8, in their shapes.
        scales: fp32, one for each block on this rank, 1-D.
    """

    def __init__(
        self, params: Sequence[Param], codes: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]
    ) -> None:
        device = params[0].device
        limit, self._tiles = chunk_on(device), {}
        for param, code, scale in zip(params, codes, scales, strict=True):
            self._tiles[param.name] = _tiles_of(param, code, scale, limit)
        stretches = [tiles.stretch for several in self._tiles.values() for tiles in several]
        numel = max(map(TileScratch.size, stretches), default=0)
        self._scratch = TileScratch(device, numel, 2)
        self._noise = torch.empty(numel, device=device)
        self._rounder = Rounder(numel, device)

    def begin(self) -> None:
        """Set the averages to the weights, rounded to nearest."""
        self._noise.fill_(0.5)
        for tiles in (tiles for several in self._tiles.values() for tiles in several):
            wide, spare = self._scratch.buffers(tiles.stretch)
            wide.inner.copy_(tiles.weight)
            _encode(tiles, wide, spare, self._noise)

    def __call__(self, weight: float, seed: int, step: int) -> None:
        """Move averages by a share of their distance to the weights."""
        for name, several in self._tiles.items():
            for tiles in several:
                wide, other = self._scratch.buffers(tiles.stretch)
                _decode(tiles, wide)
                wide.inner.lerp_(other.inner.copy_(tiles.weight), weight)
                self._fill_noise(name, tiles, seed, step)
                _encode(tiles, wide, other, self._noise)

    def decode(self, name: str) -> None:
        """Set a parameter to its average."""
        for tiles in self._tiles[name]:
            wide = self._scratch.buffers(tiles.stretch)[0]
            _decode(tiles, wide)
            tiles.weight.copy_(wide.inner)

    def _fill_noise(self, name: str, tiles: _Tiles, seed: int, step: int) -> None:
        """Numbers in (0, 1), whose mean is 0.5, for the elements of the tiles."""
        start = tiles.first
        for part in self._noise[: tiles.stretch.numel].split(self._rounder.numel):
            bits = self._rounder.random_bits(seed, step, [(name, start)], [part.numel()])
            part.copy_(bits).add_(0.5).mul_(2**-16)
            start += part.numel()


def _tiles_of(param: Param, codes: torch.Tensor, scales: torch.Tensor, limit: int) -> list[_Tiles]:
    result = []
    for whole in stretches_of(layout_of(param), 0, 0):
        for stretch in whole.pieces(limit):
            own = scales[stretch.scale : stretch.scale + stretch.num_scales].view(stretch.grid)
            first = (param.start or 0) + stretch.start
            result.append(_Tiles(stretch.matrix(param.local), stretch.matrix(codes), own, stretch, first))
    return result


def _decode(tiles: _Tiles, wide: Buffer) -> None:
    height, width = tiles.stretch.grid
    wide.inner.copy_(tiles.codes)
    wide.tiles.mul_(tiles.scales.view(height, 1, width, 1))
    wide.inner.masked_fill_(tiles.codes == _NAN, torch.nan)


def _encode(tiles: _Tiles, wide: Buffer, spare: Buffer, noise: torch.Tensor) -> None:
    """Round averages to codes; overwrites both buffers."""
    height, width = tiles.stretch.grid
    bad = wide.inner.isfinite().logical_not_()
    wide.inner.masked_fill_(bad, 0)
    for rest in wide.padding:
        rest.zero_()
    torch.abs(wide.values, out=spare.values)
    torch.amax(spare.tiles, (1, 3), out=tiles.scales).div_(_TOP).clamp_min_(_LEAST_SCALE)
    wide.tiles.div_(tiles.scales.view(height, 1, width, 1))
    wide.inner.add_(noise[: tiles.stretch.numel].view(wide.inner.shape)).floor_().clamp_(-_TOP, _TOP)
    tiles.codes.copy_(wide.inner.masked_fill_(bad, _NAN))
