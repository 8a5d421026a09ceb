# ruff: noqa: N803  # constants of a kernel are in capitals
# mypy: ignore-errors
# (Triton has no types, and may be absent where this is checked.)
"""Triton kernel for AdamW with 8-bit moments: decode, average, update, encode; see `adam.kernels_triton`.

PASSES = 1     TILES whole tiles a program, with moments in registers
PASSES = 2     a tile too large for that, in PIECES pieces: one pass for its scales, one that does it all
"""

import triton
import triton.language as tl

from block_optim.adam.kernels_triton import INTERPRETED, _at, _load, _reciprocal, _update
from block_optim.adam.q8 import codec, ops

GRAD_MAX = tl.constexpr(ops.GRAD_MAX)
SQUARE_MIN, SQUARE_MAX = tl.constexpr(ops.SQUARE_MIN), tl.constexpr(ops.SQUARE_MAX)
SCALE_MIN, SCALE_MAX = tl.constexpr(codec.SCALE_MIN), tl.constexpr(codec.SCALE_MAX)
FIRST_SHIFT, SECOND_SHIFT = tl.constexpr(codec.FIRST.shift), tl.constexpr(codec.SECOND.shift)
FIRST_OFFSET, SECOND_OFFSET = tl.constexpr(codec.FIRST.offset), tl.constexpr(codec.SECOND.offset)
FIRST_ZERO, SECOND_ZERO = tl.constexpr(codec.FIRST_ZERO), tl.constexpr(codec.SECOND_ZERO)
FIRST_ROUNDING, SECOND_ROUNDING = tl.constexpr(codec.FIRST.rounding), tl.constexpr(codec.SECOND.rounding)
FIRST_INVERSE_TOP, SECOND_INVERSE_TOP = tl.constexpr(1 / codec.FIRST_TOP), tl.constexpr(1 / codec.SECOND_TOP)


@triton.jit
def _places(
    tile, there, across, rows, columns, piece, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    ROW_SPAN: tl.constexpr, COLUMN_SPAN: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """First elements of rows (int64), columns and a mask, of a piece of tiles; (tiles, rows, columns)."""
    across_tile: tl.constexpr = (TILE_COLUMNS + COLUMN_SPAN - 1) // COLUMN_SPAN
    r = piece // across_tile * ROW_SPAN + tl.arange(0, ROW_SPAN)[None, :, None]
    c = piece % across_tile * COLUMN_SPAN + tl.arange(0, COLUMN_SPAN)[None, None, :]
    if SINGLE:
        i, j = tile[:, None, None] * TILE_ROWS + r, c
    else:
        band = tile // across
        i = band[:, None, None] * TILE_ROWS + r
        j = (tile - band * across)[:, None, None] * TILE_COLUMNS + c
    mask = there[:, None, None] & (r < TILE_ROWS) & (i < rows) & (c < TILE_COLUMNS) & (j < columns)
    return i.to(tl.int64) * columns, j, mask


@triton.jit
def _average(first, second, offset, first_factor, second_factor, g, mask, rate, VECTOR: tl.constexpr):
    """Both moments from their old codes, and the root of the second.

    Elements that do not exist count for no scale: their first moment is 0, and their second the least there can be.
    """
    code = tl.load(_at(first, tl.uint8, VECTOR) + offset, mask=mask, other=0).to(tl.int32)
    m = (((code & 127) + FIRST_OFFSET) << FIRST_SHIFT).to(tl.float32, bitcast=True) - FIRST_ZERO
    m = (m.to(tl.int32, bitcast=True) | ((code << 24) & -0x80000000)).to(tl.float32, bitcast=True)
    m = m * first_factor[:, None, None]
    code = tl.load(_at(second, tl.uint8, VECTOR) + offset, mask=mask, other=0).to(tl.int32)
    v = ((code + SECOND_OFFSET) << SECOND_SHIFT).to(tl.float32, bitcast=True) - SECOND_ZERO
    v = v * second_factor[:, None, None]
    v = v * v
    g = tl.clamp(g, -GRAD_MAX, GRAD_MAX, propagate_nan=tl.PropagateNan.ALL)
    m = m + g * tl.load(rate + 2)
    v = v + g * g * tl.load(rate + 4)
    return m, tl.clamp(v, SQUARE_MIN, SQUARE_MAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _magnitude(x):
    """Bits that order numbers by magnitude, NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _largest(magnitude):
    """The largest of each tile's magnitudes, as fp32; NaN where one is NaN."""
    return tl.max(tl.max(magnitude, 2), 1).to(tl.float32, bitcast=True)


@triton.jit
def _root(v):
    """v / sqrt(v) as the CPU gets it: its plain square root is not rounded correctly everywhere.

    Of NaN and of numbers from SQUARE_MIN to SQUARE_MAX: `sqrt.rn` and `rcp.rn` less their paths for others. Numbers
    below 2**-100, whose residual would be denormal, are scaled by 2**24 and their roots by 2**-12.
    """
    if INTERPRETED:
        return tl.div_rn(1.0, tl.sqrt_rn(v)) * v
    else:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .pred small;
            .reg .f32 x, y, g, h, n, r, s, e;
            setp.lt.f32 small, $1, 0f0D800000;
            mov.f32 x, $1;
            @small mul.rn.f32 x, x, 0f4B800000;
            rsqrt.approx.ftz.f32 y, x;
            mul.rn.f32 g, x, y;
            mul.rn.f32 h, y, 0f3F000000;
            neg.f32 n, g;
            fma.rn.f32 r, n, g, x;
            fma.rn.f32 s, r, h, g;
            rcp.approx.ftz.f32 y, s;
            neg.f32 n, s;
            fma.rn.f32 e, n, y, 0f3F800000;
            fma.rn.f32 y, y, e, y;
            mul.rn.f32 $0, y, x;
            @small mul.rn.f32 $0, $0, 0f39800000;
            }
            """,
            "=&f,f", [v], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _scale(largest, INVERSE_TOP: tl.constexpr):
    """Scales from largest magnitudes, and their reciprocals."""
    scale = largest * INVERSE_TOP
    scale = tl.clamp(scale, SCALE_MIN, SCALE_MAX, propagate_nan=tl.PropagateNan.ALL)
    return scale, _reciprocal(scale)


@triton.jit
def _encode_first(ratio):
    bits = ratio.to(tl.int32, bitcast=True)
    code = (tl.abs(ratio) + FIRST_ZERO).to(tl.int32, bitcast=True) + FIRST_ROUNDING
    return (tl.minimum(code >> FIRST_SHIFT, 127) | ((bits >> 24) & 128)).to(tl.uint8)


@triton.jit
def _encode_second(ratio):
    code = (ratio + SECOND_ZERO).to(tl.int32, bitcast=True) + SECOND_ROUNDING
    return tl.minimum(tl.maximum(code >> SECOND_SHIFT, 0), 255).to(tl.uint8)


@triton.jit
def _finish(
    param, first, second, start, j, p, m, v, first_inverse, second_inverse, rate, row, step, mask,
    VECTOR: tl.constexpr, PARAM_TYPE: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Update the parameters and write the codes of some elements."""
    root = _root(v)
    update = m * tl.load(rate + 6) * _reciprocal(root + tl.load(rate + 5))
    _update(param, start, j, p, update, rate, row, step, mask, PARAM_TYPE, VECTOR, ROUND)
    code = _encode_first(m * first_inverse[:, None, None])
    tl.store(_at(first, tl.uint8, VECTOR) + (start + j), code, mask=mask)
    code = _encode_second(root * second_inverse[:, None, None])
    tl.store(_at(second, tl.uint8, VECTOR) + (start + j), code, mask=mask)


@triton.jit
def _tiles(table, row_of, TILES: tl.constexpr, TILE_COLUMNS: tl.constexpr, VECTOR: tl.constexpr):
    """This program's row, the stretch's rows and columns, tiles, which of them exist, tiles across, the class."""
    program = tl.program_id(0)
    row = table + tl.load(row_of + program) * 14
    rows, columns = tl.load(row + 6).to(tl.int32), tl.multiple_of(tl.load(row + 7), VECTOR)
    tile = (program - tl.load(row + 8).to(tl.int32)) * TILES + tl.arange(0, TILES)
    there = tile < tl.load(row + 13).to(tl.int32)
    across = ((columns + TILE_COLUMNS - 1) // TILE_COLUMNS).to(tl.int32)
    return row, rows, columns, tile, there, across, tl.load(row + 9).to(tl.int32)


@triton.jit
def quantized_adamw(
    table, rates, counts, row_of, flag,
    TILES: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    ROW_SPAN: tl.constexpr, COLUMN_SPAN: tl.constexpr, VECTOR: tl.constexpr, SINGLE: tl.constexpr,
    PIECES: tl.constexpr, PASSES: tl.constexpr,
    PARAM_TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """One AdamW step of TILES tiles. `table` and `rates` have the columns named there, `row_of` a row each program."""
    skip = tl.load(flag)
    row, rows, columns, tile, there, across, kind = _tiles(table, row_of, TILES, TILE_COLUMNS, VECTOR)
    param, grad, first, second = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    first_scales = _at(tl.load(row + 4), tl.float32, 4) + tile
    second_scales = _at(tl.load(row + 5), tl.float32, 4) + tile
    if skip != 0.0:
        return
    rate = rates + kind * 8
    first_factor = tl.load(first_scales, mask=there, other=1.0) * tl.load(rate + 1)
    second_factor = tl.load(second_scales, mask=there, other=1.0) * tl.load(rate + 7)
    if PASSES == 1:
        start, j, mask = _places(
            tile, there, across, rows, columns, 0, TILE_ROWS, TILE_COLUMNS, ROW_SPAN, COLUMN_SPAN, SINGLE,
        )  # fmt: skip
        g = _load(grad, start + j, mask, GRAD_TYPE, VECTOR)
        m, v = _average(first, second, start + j, first_factor, second_factor, g, mask, rate, VECTOR)
        p = _load(param, start + j, mask, PARAM_TYPE, VECTOR)  # in flight while the largest are found
        first_largest, second_largest = _magnitude(m), _magnitude(v)
    else:
        first_largest = tl.zeros([TILES, ROW_SPAN, COLUMN_SPAN], tl.int32)
        second_largest = first_largest
        for piece in range(PIECES):
            start, j, mask = _places(
                tile, there, across, rows, columns, piece, TILE_ROWS, TILE_COLUMNS, ROW_SPAN, COLUMN_SPAN, SINGLE,
            )  # fmt: skip
            g = _load(grad, start + j, mask, GRAD_TYPE, VECTOR)
            m, v = _average(first, second, start + j, first_factor, second_factor, g, mask, rate, VECTOR)
            first_largest = tl.maximum(first_largest, _magnitude(m))
            second_largest = tl.maximum(second_largest, _magnitude(v))
    scale, first_inverse = _scale(_largest(first_largest), FIRST_INVERSE_TOP)
    tl.store(first_scales, scale, mask=there)
    scale, second_inverse = _scale(_root(_largest(second_largest)), SECOND_INVERSE_TOP)
    tl.store(second_scales, scale, mask=there)
    step = tl.load(counts + kind).to(tl.int64)
    if PASSES == 1:
        _finish(
            param, first, second, start, j, p, m, v, first_inverse, second_inverse, rate, row, step, mask,
            VECTOR, PARAM_TYPE, ROUND,
        )  # fmt: skip
    else:
        for piece in range(PIECES):
            start, j, mask = _places(
                tile, there, across, rows, columns, piece, TILE_ROWS, TILE_COLUMNS, ROW_SPAN, COLUMN_SPAN, SINGLE,
            )  # fmt: skip
            p = _load(param, start + j, mask, PARAM_TYPE, VECTOR)
            g = _load(grad, start + j, mask, GRAD_TYPE, VECTOR)
            m, v = _average(first, second, start + j, first_factor, second_factor, g, mask, rate, VECTOR)
            _finish(
                param, first, second, start, j, p, m, v, first_inverse, second_inverse, rate, row, step, mask,
                VECTOR, PARAM_TYPE, ROUND,
            )  # fmt: skip
