"""Formats of quantized blocks: FP8, int8 and NF4. Values as codes and one scale a tile.

    values  fp32, bf16, fp16   --quantize-->   codes uint8, scales fp32   --dequantize-->   value = code * scale

Codes of a row are contiguous, `code_bytes(columns)` of them; scales are row-major over tiles. Both depend on the tensor
alone, not on how its rows are divided into runs of whole bands.

A tile's scale is the reciprocal of TransformerEngine's `compute_scale_from_amax`, in fp32: top / amax, 1 for amax 0,
the largest fp32 number where that overflows; for a power of two all bits but the exponent's are cleared. A tile with a
NaN or an infinity gets the scale NaN and codes 0, so every value that is read back from it is NaN.

On CUDA Triton kernels do the work (`launch`) for tiles that a program can hold. Else torch ops do, on pieces of whole
bands that caches hold, copied to fp32.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ragged_shard.device import is_cpu

from . import launch
from .noise import Noise, random_bits
from .tiles import Bands, RowRun, Runs, TileGrid, bands_of

VALUES = (torch.float32, torch.bfloat16, torch.float16)
VERSION = 1  # in each format's record; raise it when a code of any format gets another number
_FIELD = 10**8
_CHUNK, _CHUNK_ON_GPU = 1 << 17, 1 << 25  # elements that torch ops take at once


class BlockFormat:
    """A format of quantized tiles: one code an element and one scale a tile, unless a subclass differs.

    Frozen, hashable; communicates nothing, keeps no memory. Buffers are 1-D and contiguous: values in fp32, bf16 or
    fp16, codes in uint8, scales in fp32. A run names its position in each of them; other elements do not change. Runs
    are whole bands (any method raises ValueError for a cut tile), and may be empty.

    Attributes:
        code: number of the format in the kernels.
        top: the largest number that has a code.
        size: elements that share an 8-bit scale within a tile.
        scale: "pow2" if scales are powers of two.
        rounding: "nearest", or "stochastic", which takes noise.
        kernel_writes: whether there is a kernel that quantizes.
    """

    code: ClassVar[int]
    top: ClassVar[float] = 0.0
    size: int = 0
    scale: str = "fp32"
    rounding: str = "nearest"
    kernel_writes: ClassVar[bool] = True

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        raise NotImplementedError

    @property
    def needs_noise(self) -> bool:
        """Whether `quantize` takes random bits."""
        return self.rounding == "stochastic"

    @property
    def piece(self) -> tuple[int, int]:
        """Rows and columns of a tile that a program of a kernel takes at once. They divide the tile."""
        return self.tile

    @property
    def record(self) -> int:
        """How codes are read back, as a number for checkpoints: `VERSION`, `code`, and rows and columns of a block.

        The latter take eight decimal digits each: 11_00000001_00000256 is version 1, `BlockInt8(256)`.
        """
        rows, columns = (1, self.size) if self.size else self.tile
        return ((VERSION * 10 + self.code) * _FIELD + rows) * _FIELD + columns

    @staticmethod
    def describe(record: int) -> str:
        """The format of a record, for messages."""
        rest, columns = divmod(record, _FIELD)
        kind, rows = divmod(rest, _FIELD)
        version, code = divmod(kind, 10)
        texts = (f"BlockFP8(({rows}, {columns}))", f"BlockInt8({columns})", f"BlockNF4({columns})")
        if version != VERSION or code >= len(texts):
            return f"codes of version {version} (this release of dbuffer has version {VERSION})"
        return texts[code]

    def grid(self, shape: Sequence[int]) -> TileGrid:
        """The tiles of a tensor."""
        return TileGrid(tuple(shape), self.tile)

    def code_bytes(self, columns: int) -> int:
        """Bytes of the codes of one row."""
        return columns

    def quantize(
        self, runs: Runs, values: Tensor, codes: Tensor, scales: Tensor, *, noise: Noise | None = None
    ) -> None:
        """Write the codes and scales of the runs' rows. Stochastic rounding takes noise, and nothing else does.

        Raises:
            ValueError: noise is missing or does not apply, a run cuts a tile, or a buffer does not fit.
        """
        if self.needs_noise != (noise is not None):
            what = "needs noise" if self.needs_noise else "rounds to nearest and takes no noise"
            raise ValueError(f"{self} {what}")
        _check(self, runs, values=values, codes=codes, scales=scales)
        if self.kernel_writes and launch.has_kernels(self, values.device):
            launch.quantize(self, runs, values, codes, scales, noise)
            return
        for run, piece in _pieces(runs, values.device):
            x = _rows(values, run.values, run.grid.columns, piece).to(torch.float32, copy=True)
            amax = _largest(x, self.tile[1])
            into = _rows(codes, run.codes, self.code_bytes(run.grid.columns), piece)
            element = run.element + piece.row * run.grid.columns
            _tiles(scales, run, piece).copy_(self._encode(x, amax, into, noise, element))

    def dequantize(self, runs: Runs, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write the values of the runs' rows, rounded once to the dtype of `out`."""
        _check(self, runs, codes=codes, scales=scales, values=out)
        self._read(runs, codes[None], scales[None], out)

    def sum(self, runs: Runs, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write the sums over ranks, added one after another in fp32 in the order of ranks.

        Args:
            codes: (ranks, bytes), every rank's codes of the same rows.
            scales: (ranks, scales).
            out: fp32.
        """
        shapes = (tuple(codes.shape), tuple(scales.shape))
        whole = codes.is_contiguous() and scales.is_contiguous()
        if {len(shape) for shape in shapes} != {2} or not codes.shape[0] == scales.shape[0] > 0 or not whole:
            raise ValueError(
                f"codes, scales: expected (ranks, n) without gaps, as many ranks, at least one; got {shapes}"
            )
        if out.dtype != torch.float32:
            raise ValueError(f"out: sums are {torch.float32}, got {out.dtype}")
        _check(self, runs, codes=codes[0], scales=scales[0], values=out)
        self._read(runs, codes, scales, out)

    def _read(self, runs: Runs, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        if launch.has_kernels(self, out.device):
            launch.read(self, runs, codes, scales, out, _table(LEVELS, out.device))
            return
        for run, piece in _pieces(runs, out.device):
            into = _rows(out, run.values, run.grid.columns, piece)
            direct = into if out.dtype == torch.float32 else torch.empty_like(into, dtype=torch.float32)
            for rank, (row, factors) in enumerate(zip(codes, scales, strict=True)):
                x = torch.empty_like(direct) if rank else direct
                encoded = _rows(row, run.codes, self.code_bytes(run.grid.columns), piece)
                self._decode(encoded, _tiles(factors, run, piece), x)
                if rank:
                    direct.add_(x)
            if direct is not into:
                into.copy_(direct)

    # Torch ops on a piece: x (fp32) and codes are (bands, rows of a band, columns), amax and scales (bands, tiles).

    def _encode(self, x: Tensor, amax: Tensor, codes: Tensor, noise: Noise | None, element: int) -> Tensor:
        """Write the codes, of which noise counts elements from `element` on; returns the tiles' scales.

        `amax` has the largest magnitude of each tile, NaN where one is NaN. It and x are overwritten.
        """
        up, down = _reciprocal(amax, self.top, self.scale == "pow2")
        _multiply(x, up, self.tile[1])
        if not is_cpu(x.device) or up.isnan().any():  # on a device the host does not ask, which would wait
            x.nan_to_num_(0.0)  # whole tiles: their factor is NaN
        self._store(x, codes, noise, element)
        return down

    def _store(self, x: Tensor, codes: Tensor, noise: Noise | None, element: int) -> None:
        """Write the codes of numbers of magnitude `top` at most, up to rounding; these are overwritten."""
        raise NotImplementedError

    def _load(self, codes: Tensor, x: Tensor) -> None:
        """Write the numbers of codes."""
        raise NotImplementedError

    def _decode(self, codes: Tensor, scales: Tensor, x: Tensor) -> None:
        """Write the values."""
        self._load(codes, x)
        _multiply(x, scales, self.tile[1])


@dataclass(frozen=True)
class BlockFP8(BlockFormat):
    """e4m3 codes with one scale a tile: 1.00024 bytes an element with tiles of 128x128, 1.0039 with 32x32.

    |value read back - value| <= max(|value| / 16, scale / 1024). A value within 4 % of fp32's largest may be read back
    as infinity. Square tiles transpose exactly, so the same codes serve a matrix and its transpose.

    Args:
        tile: rows and columns that share a scale.
        scale: "pow2": a power of two; a value that is read back as bf16 is exact. "fp32": the number that maps the
            tile's amax to 448, which uses the whole range but rounds a second time.

    Raises:
        ValueError: a tile that is not two positive integers, or another kind of scale.
    """

    tile: tuple[int, int] = (128, 128)
    scale: Literal["pow2", "fp32"] = "pow2"
    code, top = 0, 448.0

    def __post_init__(self) -> None:
        tile = tuple(self.tile) if isinstance(self.tile, tuple | list) else ()
        if len(tile) != 2 or any(type(size) is not int or size < 1 for size in tile):
            raise ValueError(f"BlockFP8: tile: expected (rows, columns), integers from 1, got {self.tile!r}")
        if self.scale not in ("pow2", "fp32"):
            raise ValueError(f"BlockFP8: scale: expected 'pow2' or 'fp32', got {self.scale!r}")
        object.__setattr__(self, "tile", tile)

    def _store(self, x: Tensor, codes: Tensor, noise: Noise | None, element: int) -> None:
        """To nearest even. Clamped first: beyond 448 torch gives NaN before 2.12 and 448 from then on."""
        codes.view(torch.float8_e4m3fn).copy_(x.clamp_(-self.top, self.top))

    def _load(self, codes: Tensor, x: Tensor) -> None:
        """A code's bits, moved up by 7, are an fp16 number of 1/256 of its value, unless it is NaN.

        torch reads fp16 many times faster than e4m3 on a CPU. On a device the host does not look for NaN, and waits.
        """
        if not is_cpu(codes.device) or int((codes & 0x7F).max()) == 0x7F:
            x.copy_(codes.view(torch.float8_e4m3fn))
            return
        bits = codes.view(torch.int8).to(torch.int16).mul_(128).bitwise_and_(-0x4001)
        x.copy_(bits.view(torch.float16)).mul_(256.0)


@dataclass(frozen=True)
class BlockInt8(BlockFormat):
    """Codes -127..127 with one fp32 scale for each `size` consecutive elements of a row: 1 + 4/size bytes an element.

    |value read back - value| <= block's amax / 254 to nearest (ties to even), amax / 127 stochastically: then the
    code's mean is the value, so that errors of many ranks and steps cancel.

    Args:
        size: elements that share a scale; a row's last block may be short.
        rounding: "nearest", or "stochastic", which takes a `Noise` at each call.

    Raises:
        ValueError: a size below 1, or another rounding.
    """

    size: int = 256
    rounding: Literal["nearest", "stochastic"] = "nearest"
    code, top = 1, 127.0

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

    def _store(self, x: Tensor, codes: Tensor, noise: Noise | None, element: int) -> None:
        """Rounds to nearest, or x + u down, u an odd multiple of 2^-17 in (0, 1).

        The mean of u is 1/2, and an integer up to 127 plus u is exact in fp32, so integers stay.
        """
        if noise is None:
            x.round_()
        else:
            bits = random_bits(noise, element, x.numel(), x.device)
            bits.bitwise_right_shift_(15).bitwise_and_(0x1FFFE).bitwise_or_(1)
            x.add_(bits.view(x.shape), alpha=2.0**-17).floor_()
        codes.view(torch.int8).copy_(x.clamp_(-self.top, self.top))

    def _load(self, codes: Tensor, x: Tensor) -> None:
        x.copy_(codes.view(torch.int8))


GROUP = 256  # blocks of NF4 that share an fp32 scale
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
    0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
MIDDLES = tuple((low + high) / 2 for low, high in itertools.pairwise(LEVELS))


@dataclass(frozen=True)
class BlockNF4(BlockFormat):
    """16 levels with an 8-bit scale for each `size` consecutive elements of a row, and an fp32 scale for 256 of those.

        value = level[code] * block scale          block scale = group's amax * (byte / 255)^2

    A row's codes are self-contained, except the fp32 scales, which hold the groups' amax:

        | two codes a byte, low half first: ceil(columns / 2) | one byte a block: ceil(columns / size) |

    0.5 + 1/64 + 4/min(columns, 16384) bytes an element with blocks of 64: 0.517 with 4096 columns, at most 0.56 from
    128 columns on. |value read back - value| <= 0.152 block scales, half of the widest step; a block scale is at least
    the block's amax, and at most (1/255 + 2 sqrt(amax / group's amax)) / 255 of the group's amax above it.

    The levels are the 16 quantiles of a normal distribution that QLoRA (arXiv 2305.14314, appendix E) lists. There, a
    second scale serves 256 blocks over several rows, taken from their mean; here groups stay within a row, so that any
    cut between rows leaves codes as they are. Torch ops quantize, also on CUDA: weights at rest are quantized once.

    Args:
        size: elements of a block, even; a row's last block may be short.

    Raises:
        ValueError: a size that is not an even integer from 2.
    """

    size: int = 64
    code, kernel_writes = 2, False

    def __post_init__(self) -> None:
        if type(self.size) is not int or self.size < 2 or self.size % 2:
            raise ValueError(f"BlockNF4: size: expected an even integer from 2, got {self.size!r}")

    @property
    def tile(self) -> tuple[int, int]:
        """The blocks that share an fp32 scale: one row of 256."""
        return (1, GROUP * self.size)

    @property
    def piece(self) -> tuple[int, int]:
        """About 2048 elements of whole blocks, a power of two of them."""
        blocks = 2048 // self.size
        return (1, self.size * min(GROUP, 1 << max(0, blocks.bit_length() - 1)))

    def code_bytes(self, columns: int) -> int:
        """Two codes a byte, then one byte a block."""
        return -(-columns // 2) + -(-columns // self.size)

    def sum(self, runs: Runs, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Raises ValueError: four bits are for weights, not for contributions to a sum."""
        raise ValueError(f"{self} is for weights, not reductions; use BlockInt8 for gradients")

    def _above(self, groups: Tensor, columns: int) -> Tensor:
        """The amax of each block's group: (rows, blocks)."""
        blocks = -(-columns // self.size)
        return groups.repeat_interleave(min(GROUP, blocks), dim=1)[:, :blocks]

    def _encode(self, x: Tensor, amax: Tensor, codes: Tensor, noise: Noise | None, element: int) -> Tensor:
        """Write codes and bytes of blocks. A group with a bad number has codes and bytes 0."""
        amax.masked_fill_(~amax.isfinite(), torch.nan)
        columns, half = x.shape[2], -(-x.shape[2] // 2)
        above, codes = self._above(amax, columns), codes[:, 0]
        bytes_ = _largest(x, self.size).div_(above).sqrt_().mul_(255.0).ceil_().clamp_(max=255.0)
        codes[:, half:] = bytes_.nan_to_num_(0.0)  # in a group of zeros, or a bad one
        _multiply(x, _reciprocal(_block_scales(codes[:, half:], above), 1.0, pow2=False)[0], self.size)
        x = torch.nn.functional.pad(x[:, 0], (0, columns % 2)).nan_to_num_(-2.0)
        levels = torch.bucketize(x, _table(MIDDLES, x.device), out_int32=True).to(torch.uint8)
        torch.bitwise_or(levels[:, ::2], levels[:, 1::2] << 4, out=codes[:, :half])
        return amax

    def _decode(self, codes: Tensor, scales: Tensor, x: Tensor) -> None:
        columns, half = x.shape[2], -(-x.shape[2] // 2)
        codes = codes[:, 0]
        pairs = torch.index_select(_pairs(x.device), 0, codes[:, :half].int().view(-1))
        x.copy_(pairs.view(torch.float32).view(-1, 1, 2 * half)[..., :columns])
        _multiply(x, _block_scales(codes[:, half:], self._above(scales, columns)), self.size)


def _block_scales(bytes_: Tensor, above: Tensor) -> Tensor:
    """Scales of blocks, fp32: the byte's square of 255ths of the group's amax."""
    return bytes_.float().square_().mul_(1.0 / 65025.0).mul_(above)


@functools.cache
def _pairs(device: torch.device) -> Tensor:
    """The two levels of each byte, fp32, as 64 bits."""
    bytes_, levels = torch.arange(256, device=device), _table(LEVELS, device)
    return torch.stack((levels[bytes_ & 15], levels[bytes_ >> 4]), dim=1).view(torch.int64).view(-1)


@functools.cache
def _table(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """A table in fp32."""
    return torch.tensor(numbers, dtype=torch.float32, device=device)


# -- tiles of pieces ---------------------------------------------------------------------------------------------------


def _pieces(runs: Runs, device: torch.device) -> Iterator[tuple[RowRun, Bands]]:
    limit = _CHUNK if is_cpu(device) else _CHUNK_ON_GPU
    return ((run, piece) for run in runs for piece in bands_of(run, limit))


def _rows(flat: Tensor, start: int, width: int, piece: Bands) -> Tensor:
    """A piece in a flat buffer where the run begins at `start`: (bands, rows of a band, width)."""
    numel = piece.bands * piece.height * width
    return flat.narrow(0, start + piece.row * width, numel).view(piece.bands, piece.height, width)


def _tiles(scales: Tensor, run: RowRun, piece: Bands) -> Tensor:
    """The scales of a piece: (bands, tiles of a band)."""
    across = run.grid.across
    return scales.narrow(0, run.scales + piece.band * across, piece.bands * across).view(piece.bands, across)


def _parts(x: Tensor, width: int) -> Iterator[tuple[slice, Tensor]]:
    """The whole tiles of rows (..., columns), then the short one: (which, (..., tiles, columns of a tile))."""
    full = x.shape[-1] // width
    if full:
        yield slice(full), x[..., : full * width].unflatten(-1, (full, width))
    if full * width < x.shape[-1]:
        yield slice(full, full + 1), x[..., None, full * width :]


def _largest(x: Tensor, width: int) -> Tensor:
    """The largest magnitude of a piece's tiles of `width` columns, one NaN for all bit patterns: (bands, tiles)."""
    rows = x.abs()
    rows = rows[:, 0] if x.shape[1] == 1 else rows.amax(1)
    largest = torch.cat([part.amax(-1) for _, part in _parts(rows, width)], dim=1)
    return largest.masked_fill_(largest.isnan(), torch.nan)


def _multiply(x: Tensor, factors: Tensor, width: int) -> None:
    """Multiply a piece by its tiles' factors (bands, tiles)."""
    if x.shape[1] > 1:
        x.mul_(factors.repeat_interleave(width, dim=1)[:, None, : x.shape[2]])
        return
    for which, part in _parts(x, width):
        part.mul_(factors[:, None, which, None])


def _reciprocal(amax: Tensor, top: float, pow2: bool) -> tuple[Tensor, Tensor]:
    """(factors of values, NaN where the amax is not finite; factors of codes)."""
    up = torch.full_like(amax, top).div_(amax)  # `top / amax` would round twice
    up.masked_fill_(amax == 0, 1.0).clamp_(max=torch.finfo(torch.float32).max)
    if pow2:
        up.view(torch.int32).bitwise_and_(-0x800000)
    up.masked_fill_(~amax.isfinite(), torch.nan)
    down = torch.reciprocal(up)
    return up, down.masked_fill_(down.isnan(), torch.nan)


# -- checks ------------------------------------------------------------------------------------------------------------


def _check(fmt: BlockFormat, runs: Runs, **buffers: Tensor) -> None:
    """Check the buffers `values`, `codes`, `scales` that runs are read from or written to.

    Raises:
        ValueError: another dtype, more than one dimension, gaps, several devices, or a run that cuts a tile or reaches
            past an end.
    """
    device = next(iter(buffers.values())).device
    dtypes = {"codes": (torch.uint8,), "scales": (torch.float32,), "values": VALUES}
    for name, buffer in buffers.items():
        if buffer.dtype not in dtypes[name]:
            raise ValueError(f"{name}: expected {' or '.join(map(str, dtypes[name]))}, got {buffer.dtype}")
        if buffer.dim() != 1 or not buffer.is_contiguous():
            raise ValueError(
                f"{name}: expected one dimension without gaps, got shape {tuple(buffer.shape)} with strides "
                f"{buffer.stride()}; pass a flat view"
            )
        if buffer.device != device:
            raise ValueError(f"{name}: is on {buffer.device}, another buffer on {device}")
    sizes = {name: buffer.numel() for name, buffer in buffers.items()}
    for run in runs:
        _check_run(fmt, run, sizes)


def _check_run(fmt: BlockFormat, run: RowRun, sizes: dict[str, int]) -> None:
    grid, rows = run.grid, run.stop - run.start
    which = f"rows [{run.start}, {run.stop}) of a tensor of shape {grid.shape}"
    if not 0 <= run.start <= run.stop <= grid.rows:
        raise ValueError(f"{which}: it has the rows [0, {grid.rows})")
    if grid.tile != fmt.tile:
        raise ValueError(f"{which}: its tiles are {grid.tile}, {fmt} has tiles {fmt.tile}; use its `grid`")
    if not grid.is_whole(run.start, run.stop):
        raise ValueError(f"{which} cut tiles of {grid.tile}; pass whole bands")
    used = {"codes": rows * fmt.code_bytes(grid.columns), "values": run.numel, "scales": run.num_scales}
    for name, size in sizes.items():
        start: int = getattr(run, name)
        if start < 0 or start + used[name] > size:
            raise ValueError(
                f"{name}: {which} are at [{start}, {start + used[name]}), the buffer has {size} elements"
            )
