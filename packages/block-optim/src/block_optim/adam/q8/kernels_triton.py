# ruff: noqa: N803  # constants of a kernel are in capitals
# mypy: ignore-errors
# (Triton has no types, and may be absent where this is checked.)
"""Triton kernel for AdamW with 8-bit moments: decode, average, update, encode.

PASSES = 1     TILES whole tiles a program, with moments in registers
PASSES = 2     a tile too large for that, in PIECES pieces: one pass for its scales, one that does it all

Imported only where Triton is used; `variants` has the constants, the sizes of programs and the number of warps. The
kernel finds its tensors by address in a table, so that one launch does many of them, and reads the step's scalars from
the device. Every product and sum is rounded separately (launch with ``enable_fp_fusion=False``), divisions and roots
are the correctly rounded ones, so that codes and parameters have the bits of the torch ops. Triton's interpreter, which
rounds bf16 wrongly and runs no assembly, gets the same numbers in other ways: bf16 by its bits, reciprocals as
divisions.

With VECTOR > 1 a launch promises that addresses are multiples of 16 bytes (codes: 8) and that rows and tiles are
multiples of VECTOR elements; only then does Triton load and store 8 or 16 bytes at a time.
"""

import triton
import triton.language as tl

from block_optim.adam.q8 import codec, ops

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
GRAD_MAX = tl.constexpr(ops.GRAD_MAX)
SQUARE_MIN, SQUARE_MAX = tl.constexpr(ops.SQUARE_MIN), tl.constexpr(ops.SQUARE_MAX)
SCALE_MIN, SCALE_MAX = tl.constexpr(codec.SCALE_MIN), tl.constexpr(codec.SCALE_MAX)
FIRST_SHIFT, SECOND_SHIFT = tl.constexpr(codec.FIRST.shift), tl.constexpr(codec.SECOND.shift)
FIRST_OFFSET, SECOND_OFFSET = tl.constexpr(codec.FIRST.offset), tl.constexpr(codec.SECOND.offset)
FIRST_ZERO, SECOND_ZERO = tl.constexpr(codec.FIRST_ZERO), tl.constexpr(codec.SECOND_ZERO)
FIRST_ROUNDING, SECOND_ROUNDING = tl.constexpr(codec.FIRST.rounding), tl.constexpr(codec.SECOND.rounding)
FIRST_INVERSE_TOP, SECOND_INVERSE_TOP = tl.constexpr(1 / codec.FIRST_TOP), tl.constexpr(1 / codec.SECOND_TOP)

# Element types, as arguments name them: 0 fp32, 1 bf16, 2 fp16.
# Columns of the table of stretches: the addresses of parameter, gradient, first and second states and their scales (or
# 0); rows, columns, the first program, the class, the first element in the global tensor, two keys, tiles.
# Columns of the table of scalars: decay, beta1, 1 - beta1 (negative to ascend), beta2, 1 - beta2, eps, step size; the
# last two multiplied by the root that corrects the second moment; root of beta2.


@triton.jit
def _at(address, TYPE: tl.constexpr, ALIGN: tl.constexpr):
    """An address as a pointer; ALIGN: bytes it is a multiple of."""
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), ALIGN)


@triton.jit
def _load(address, offset, mask, TYPE: tl.constexpr, VECTOR: tl.constexpr):
    """Elements of one of the three types, as fp32."""
    align: tl.constexpr = 16 if VECTOR > 1 else 2
    if TYPE == 0:
        return tl.load(_at(address, tl.float32, align) + offset, mask=mask, other=0.0)
    elif TYPE == 1:
        if INTERPRETED:
            bits = tl.load(_at(address, tl.int16, align) + offset, mask=mask, other=0)
            return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            return tl.load(_at(address, tl.bfloat16, align) + offset, mask=mask, other=0.0).to(tl.float32)
    else:
        return tl.load(_at(address, tl.float16, align) + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _hash(x):
    """The 32-bit mixer of `core.rounding`, on uint32, without its last step."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    return x * 0x846CA68B


@triton.jit
def _random(element, j, row, step):
    """The 16 random bits of elements ``element + j`` (int64 and int32) of the global tensor, as int32."""
    key = tl.load(row + 11) + step * 0x9E3779B9 + element
    step_hash = _hash(step.to(tl.uint32))
    other = tl.load(row + 12).to(tl.uint32) ^ step_hash ^ (step_hash >> 16)
    x = _hash(((key & 0xFFFFFFFF).to(tl.uint32) + j.to(tl.uint32)) ^ other)
    return (x >> 16).to(tl.int32)


@triton.jit
def _store(
    address, offset, value, mask, TYPE: tl.constexpr, VECTOR: tl.constexpr, ROUND: tl.constexpr, random
):
    """Write fp32 values as one of the three types; bf16 with random bits if ROUND."""
    align: tl.constexpr = 16 if VECTOR > 1 else 2
    if TYPE == 0:
        tl.store(_at(address, tl.float32, align) + offset, value, mask=mask)
    elif TYPE == 1 and not (ROUND or INTERPRETED):
        tl.store(_at(address, tl.bfloat16, align) + offset, value.to(tl.bfloat16), mask=mask)
    elif TYPE == 1:
        bits = value.to(tl.int32, bitcast=True)
        is_nan = value != value  # adding to it would make it infinity or zero
        quiet = bits | 0x400000
        if ROUND:
            bits += random
        else:
            bits += 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(is_nan, quiet, bits)
        tl.store(_at(address, tl.int16, align) + offset, (bits >> 16).to(tl.int16), mask=mask)
    else:
        tl.store(_at(address, tl.float16, align) + offset, value.to(tl.float16), mask=mask)


@triton.jit
def _reciprocal(x):
    """1 / x, rounded correctly, of NaN and of numbers from 2**-126 to 2**126: `rcp.rn` less its path for others."""
    if INTERPRETED:
        return tl.div_rn(1.0, x)
    else:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .f32 y, e, n;
            rcp.approx.ftz.f32 y, $1;
            neg.f32 n, $1;
            fma.rn.f32 e, n, y, 0f3F800000;
            fma.rn.f32 $0, y, e, y;
            }
            """,
            "=&f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _update(
    address, start, j, p, update, rate, row, step, mask,
    TYPE: tl.constexpr, VECTOR: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Decay and update parameters: elements ``start + j`` of the stretch."""
    p = p * tl.load(rate) - update
    random = 0
    if ROUND:
        random = _random(tl.load(row + 10) + start, j, row, step)
    _store(address, start + j, p, mask, TYPE, VECTOR, ROUND, random)


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
    table, rates, counts, row_of,
    TILES: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    ROW_SPAN: tl.constexpr, COLUMN_SPAN: tl.constexpr, VECTOR: tl.constexpr, SINGLE: tl.constexpr,
    PIECES: tl.constexpr, PASSES: tl.constexpr,
    PARAM_TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """One AdamW step of TILES tiles. `table` and `rates` have the columns named there, `row_of` a row each program."""
    row, rows, columns, tile, there, across, kind = _tiles(table, row_of, TILES, TILE_COLUMNS, VECTOR)
    param, grad, first, second = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    first_scales = _at(tl.load(row + 4), tl.float32, 4) + tile
    second_scales = _at(tl.load(row + 5), tl.float32, 4) + tile
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
