# ruff: noqa: N803  # constants of a kernel are in capitals
# mypy: ignore-errors
# (Triton has no types, and may be absent where this is checked.)
"""Triton kernels of the formats; imported only where Triton is to be used.

    quantize_tiles     values --> codes and scales, in one pass; random bits by element
    sum_tiles          codes and scales of one rank or several --> values, added in the order of ranks

A program does one tile, or several tiles of one row below each other; one launch does all runs. Of four-bit codes it
does a part of a tile: TILES_A_SCALE programs across share a scale.
Every product is rounded separately (launch with ``enable_fp_fusion=False``), divisions are the correctly rounded ones,
and e4m3 is worked out on bits, so that codes, scales and values have the bits of the torch ops. With VECTOR, all that a
thread touches begins on 16 elements, four-bit codes on 4 bytes.
"""

import triton
import triton.language as tl

# Element types, as arguments name them: 0 fp32, 1 bf16 (passed as int16), 2 fp16. Codes: 0 e4m3, 1 int8, 2 NF4.
# Columns of the table of pieces: where values, codes and scales begin; columns, bands, rows of a band, the first
# program, the first element as stochastic rounding counts it.


@triton.jit
def _place(table, piece_of, TILE_COLUMNS: tl.constexpr, TILES_A_SCALE: tl.constexpr, SPAN_ROWS: tl.constexpr,
           SPAN_COLUMNS: tl.constexpr, ONE_ROW: tl.constexpr, VECTOR: tl.constexpr):  # fmt: skip
    """(the piece's row of the table; its columns; this program's rows in the piece and their mask; its first column;
    offsets in the piece; their mask; scales in the piece; their mask)."""
    program = tl.program_id(0)
    piece = table + tl.load(piece_of + program).to(tl.int64) * 8
    columns = tl.load(piece + 3)
    if VECTOR:
        columns = tl.multiple_of(columns, 16)
    across = ((columns + TILE_COLUMNS - 1) // TILE_COLUMNS).to(tl.int32)
    local = program - tl.load(piece + 6).to(tl.int32)
    band, tile = (local // across).to(tl.int64), (local % across).to(tl.int64)
    down, right = tl.arange(0, SPAN_ROWS), tl.arange(0, SPAN_COLUMNS)
    start = tile * TILE_COLUMNS
    present = (start + right < columns) & (right < TILE_COLUMNS)
    scales = (across + TILES_A_SCALE - 1) // TILES_A_SCALE
    if ONE_ROW:
        first = band * SPAN_ROWS
        rows = tl.load(piece + 4) - first
        scale = (first + down) * scales + tile // TILES_A_SCALE
        scale_mask = down < rows
    else:
        rows = tl.load(piece + 5)
        first = band * rows
        scale = band * scales + tile
        scale_mask = rows > 0
    offset = ((first + down) * columns)[:, None] + (start + right)[None, :]
    mask = (down < rows)[:, None] & present[None, :]
    return piece, columns, first + down, down < rows, start, offset, mask, scale, scale_mask


@triton.jit
def _begin(piece, column: tl.constexpr, VECTOR: tl.constexpr):
    loaded = tl.load(piece + column)
    if VECTOR:
        loaded = tl.multiple_of(loaded, 16)
    return loaded


@triton.jit
def _read(values, offset, mask, TYPE: tl.constexpr):
    """Elements of one of the three types, as fp32."""
    loaded = tl.load(values + offset, mask=mask, other=0)
    if TYPE == 1:
        return (loaded.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return loaded.to(tl.float32)


@triton.jit
def _amax(x, ONE_ROW: tl.constexpr):
    """Bits of the largest magnitude of a tile, or of each row; any NaN is 0x7FC00000."""
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(magnitude, 1) if ONE_ROW else tl.max(tl.max(magnitude, 1), 0)
    return tl.where(largest > 0x7F800000, 0x7FC00000, largest)


@triton.jit
def _beside(factor, ONE_ROW: tl.constexpr):
    """Numbers of tiles in the shape that their elements take."""
    if ONE_ROW:
        return factor[:, None]
    else:
        return factor


@triton.jit
def _mix(x):
    """The 32-bit mixer of `noise`, on uint32."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _uniform(index, first, second):
    """Odd multiples of 2^-17 in (0, 1)."""
    low = (index & 0xFFFFFFFF).to(tl.uint32)
    high = (index >> 32).to(tl.uint32)
    x = _mix(low + first.to(tl.uint32))
    x = _mix(x ^ second.to(tl.uint32) ^ _mix(high * 0x9E3779B9))
    return ((x >> 15) | 1).to(tl.int32).to(tl.float32) * 7.62939453125e-06


@triton.jit
def _e4m3(x):
    """Codes of numbers in +-448, to nearest even. Below 2^-6, adding 2^14 leaves a multiple of 2^-9 in the low bits."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(magnitude < 0x3C800000, small, normal) | ((bits >> 24) & 128)


@triton.jit(do_not_specialize=["first", "second"])
def quantize_tiles(
    values, codes, scales, table, piece_of, first, second,
    TILE_COLUMNS: tl.constexpr, TILES_A_SCALE: tl.constexpr, SPAN_ROWS: tl.constexpr, SPAN_COLUMNS: tl.constexpr,
    ONE_ROW: tl.constexpr, VECTOR: tl.constexpr, TYPE: tl.constexpr, CODE: tl.constexpr, TOP: tl.constexpr,
    POW2: tl.constexpr, RANDOM: tl.constexpr,
):  # fmt: skip
    """Write codes and scales of each tile. Random bits have the keys `first`, `second`."""
    piece, _, _, _, _, offset, mask, scale, scale_mask = _place(
        table, piece_of, TILE_COLUMNS, TILES_A_SCALE, SPAN_ROWS, SPAN_COLUMNS, ONE_ROW, VECTOR
    )
    x = _read(values + _begin(piece, 0, VECTOR), offset, mask, TYPE)
    scale += tl.load(piece + 2)
    largest = _amax(x, ONE_ROW).to(tl.float32, bitcast=True)
    bad = (largest.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= 0x7F800000
    up = tl.div_rn(TOP, tl.where(bad | (largest == 0.0), TOP, largest))
    up = tl.minimum(up, 3.4028234663852886e38)
    if POW2:
        up = (up.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
    down = tl.div_rn(1.0, up)
    down_bits = tl.where(bad, 0x7FC00000, down.to(tl.int32, bitcast=True))
    tl.store(scales + scale, down_bits.to(tl.float32, bitcast=True), mask=scale_mask)
    y = tl.where(_beside(bad, ONE_ROW), 0.0, x * _beside(up, ONE_ROW))
    if CODE == 0:
        code = _e4m3(tl.minimum(tl.maximum(y, -TOP), TOP))
    else:
        if RANDOM:
            y = tl.floor(y + _uniform(tl.load(piece + 7) + offset, first, second))
        else:
            y = y + 12582912.0 - 12582912.0  # 1.5 * 2^23: rounds to nearest even
        code = tl.minimum(tl.maximum(y, -TOP), TOP).to(tl.int32)
    tl.store(codes + _begin(piece, 1, VECTOR) + offset, (code & 255).to(tl.uint8), mask=mask)


@triton.jit
def _decode(code, CODE: tl.constexpr):
    """fp32 numbers of codes. An e4m3 code moved up by 7 bits is an fp16 number of 1/256 of its value, except NaN."""
    code = code.to(tl.int32)
    if CODE == 0:
        half = ((code & 127) << 7) | ((code & 128) << 8)
        x = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((code & 127) == 127, float("nan"), x)
    else:
        return ((code ^ 128) - 128).to(tl.float32)


@triton.jit
def _decode_pairs(codes, levels, columns, row, present, start, group, SIZE: tl.constexpr, TILE_COLUMNS: tl.constexpr,
                  SPAN_COLUMNS: tl.constexpr, VECTOR: tl.constexpr):  # fmt: skip
    """Values of four-bit codes, in rows of two a byte, then a byte for each SIZE elements; see `BlockNF4`."""
    half = (columns + 1) // 2
    stride = half + (columns + SIZE - 1) // SIZE
    first = start // 2
    if VECTOR:
        half, stride, first = tl.multiple_of(half, 4), tl.multiple_of(stride, 4), tl.multiple_of(first, 4)
    inside = tl.arange(0, SPAN_COLUMNS // 2)
    pair = first + inside
    mask = present[:, None] & ((pair < half) & (inside < TILE_COLUMNS // 2))[None, :]
    at = (row * stride)[:, None]
    byte = tl.load(codes + (at + pair[None, :]), mask=mask, other=0).to(tl.int32)
    block = (start // SIZE + 2 * inside // SIZE)[None, :]
    step = tl.load(codes + (at + half + block), mask=mask, other=0).to(tl.float32)
    factor = step * step * 1.5378700499807768e-05 * group
    return tl.interleave(tl.load(levels + (byte & 15)) * factor, tl.load(levels + (byte >> 4)) * factor)


@triton.jit
def sum_tiles(
    codes, scales, out, levels, table, piece_of, code_stride, scale_stride,
    TILE_COLUMNS: tl.constexpr, TILES_A_SCALE: tl.constexpr, SPAN_ROWS: tl.constexpr, SPAN_COLUMNS: tl.constexpr,
    ONE_ROW: tl.constexpr, VECTOR: tl.constexpr, TYPE: tl.constexpr, CODE: tl.constexpr, RANKS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Write the sums over the ranks, whose codes are `code_stride` apart; for one rank, its values.

    Of NF4 there is one rank, in blocks of SIZE.
    """
    piece, columns, row, present, start, offset, mask, scale, scale_mask = _place(
        table, piece_of, TILE_COLUMNS, TILES_A_SCALE, SPAN_ROWS, SPAN_COLUMNS, ONE_ROW, VECTOR
    )
    scales += tl.load(piece + 2)
    factor = _beside(tl.load(scales + scale, mask=scale_mask, other=0), ONE_ROW)
    if CODE == 2:
        begin = tl.load(piece + 1)
        codes += tl.multiple_of(begin, 4) if VECTOR else begin
        total = _decode_pairs(
            codes, levels, columns, row, present, start, factor, SIZE, TILE_COLUMNS, SPAN_COLUMNS, VECTOR
        )
    else:
        codes += _begin(piece, 1, VECTOR)
        total = _decode(tl.load(codes + offset, mask=mask, other=0), CODE) * factor
    if RANKS > 1:
        far = tl.full((), 1, tl.int64)
        # RANKS is known when it compiles: the interpreter of Triton 3.6 cannot loop to a tensor.
        for rank in range(1, RANKS):
            factor = tl.load(scales + far * scale_stride * rank + scale, mask=scale_mask, other=0)
            factor = _beside(factor, ONE_ROW)
            code = tl.load(codes + far * code_stride * rank + offset, mask=mask, other=0)
            total += _decode(code, CODE) * factor
    _write(out + _begin(piece, 0, VECTOR) + offset, total, mask, TYPE)


@triton.jit
def _write(where, x, mask, TYPE: tl.constexpr):
    """Elements of one of the three types, rounded to nearest even."""
    if TYPE == 0:
        tl.store(where, x, mask=mask)
    elif TYPE == 1:
        bits = x.to(tl.int32, bitcast=True)
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        bits = tl.where(is_nan, 0x7FC00000, bits + 0x7FFF + ((bits >> 16) & 1))
        tl.store(where, (bits >> 16).to(tl.int16), mask=mask)
    else:
        tl.store(where, x.to(tl.float16), mask=mask)
