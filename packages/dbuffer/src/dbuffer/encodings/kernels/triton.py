# ruff: noqa: N803  # constants of a kernel are in capitals
# mypy: ignore-errors
# (Triton has no types, and may be absent where this is checked.)
"""Triton kernels of the formats; imported only where Triton is to be used.

    amax_tiles         a tile, or a few of one row --> its largest magnitude
    quantize_tiles     values --> codes and scales, in one pass; random bits by element
    sum_tiles          codes and scales of one rank or several --> values, added in the order of ranks
    write_pairs        values, and the amax of groups of blocks --> four-bit codes, and the blocks' 8-bit scales
    read_pairs         four-bit codes --> values

In the first three, a program does one tile, or several tiles of one row below each other; one launch does all runs.
Every product is rounded separately (launch with ``enable_fp_fusion=False``), divisions are the correctly rounded ones,
and e4m3 is worked out on bits, so that codes, scales and values have the bits of the torch ops. With VECTOR, all that a
thread touches begins on 16 elements.
"""

import triton
import triton.language as tl

# Element types, as arguments name them: 0 fp32, 1 bf16 (passed as int16), 2 fp16. Codes: 0 e4m3, 1 int8.
# Columns of the table of pieces: where values, codes and scales begin; columns, bands, rows of a band, the first
# program, the first element as stochastic rounding counts it.


@triton.jit
def _place(table, piece_of, TILE_COLUMNS: tl.constexpr, SPAN_ROWS: tl.constexpr, SPAN_COLUMNS: tl.constexpr,
           ONE_ROW: tl.constexpr, VECTOR: tl.constexpr):  # fmt: skip
    """(the piece's row of the table; offsets in the piece; their mask; scales in the piece; their mask)."""
    program = tl.program_id(0)
    piece = table + tl.load(piece_of + program).to(tl.int64) * 8
    columns = tl.load(piece + 3)
    if VECTOR:
        columns = tl.multiple_of(columns, 16)
    across = (columns + TILE_COLUMNS - 1) // TILE_COLUMNS
    local = program - tl.load(piece + 6)
    band, tile = local // across, local % across
    down, right = tl.arange(0, SPAN_ROWS), tl.arange(0, SPAN_COLUMNS)
    start = tile * TILE_COLUMNS
    present = (start + right < columns) & (right < TILE_COLUMNS)
    if ONE_ROW:
        first = band * SPAN_ROWS
        rows = tl.load(piece + 4) - first
        scale = (first + down) * across + tile
        scale_mask = down < rows
    else:
        rows = tl.load(piece + 5)
        first = band * rows
        scale = band * across + tile
        scale_mask = rows > 0
    offset = ((first + down) * columns)[:, None] + (start + right)[None, :]
    mask = (down < rows)[:, None] & present[None, :]
    return piece, offset, mask, scale, scale_mask


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
def amax_tiles(
    values, out, table, piece_of,
    TILE_COLUMNS: tl.constexpr, SPAN_ROWS: tl.constexpr, SPAN_COLUMNS: tl.constexpr, ONE_ROW: tl.constexpr,
    VECTOR: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Write the largest magnitude of each tile."""
    piece, offset, mask, scale, scale_mask = _place(
        table, piece_of, TILE_COLUMNS, SPAN_ROWS, SPAN_COLUMNS, ONE_ROW, VECTOR
    )
    x = _read(values + _begin(piece, 0, VECTOR), offset, mask, TYPE)
    bits = _amax(x, ONE_ROW)
    tl.store(out + tl.load(piece + 2) + scale, bits.to(tl.float32, bitcast=True), mask=scale_mask)


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
    TILE_COLUMNS: tl.constexpr, SPAN_ROWS: tl.constexpr, SPAN_COLUMNS: tl.constexpr, ONE_ROW: tl.constexpr,
    VECTOR: tl.constexpr, TYPE: tl.constexpr, CODE: tl.constexpr, TOP: tl.constexpr, POW2: tl.constexpr,
    RANDOM: tl.constexpr,
):  # fmt: skip
    """Write codes and scales of each tile. Random bits have the keys `first`, `second`."""
    piece, offset, mask, scale, scale_mask = _place(
        table, piece_of, TILE_COLUMNS, SPAN_ROWS, SPAN_COLUMNS, ONE_ROW, VECTOR
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
def sum_tiles(
    codes, scales, out, table, piece_of, code_stride, scale_stride,
    TILE_COLUMNS: tl.constexpr, SPAN_ROWS: tl.constexpr, SPAN_COLUMNS: tl.constexpr, ONE_ROW: tl.constexpr,
    VECTOR: tl.constexpr, TYPE: tl.constexpr, CODE: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Write the sums over the ranks, whose codes lie `code_stride` apart; of one rank, its values."""
    piece, offset, mask, scale, scale_mask = _place(
        table, piece_of, TILE_COLUMNS, SPAN_ROWS, SPAN_COLUMNS, ONE_ROW, VECTOR
    )
    codes += _begin(piece, 1, VECTOR)
    scales += tl.load(piece + 2)
    factor = _beside(tl.load(scales + scale, mask=scale_mask, other=0), ONE_ROW)
    total = _decode(tl.load(codes + offset, mask=mask, other=0), CODE) * factor
    if RANKS > 1:
        far = tl.full((), 1, tl.int64)
        for rank in range(
            1, RANKS
        ):  # known when it compiles: the interpreter of Triton 3.6 cannot loop to a tensor
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


@triton.jit
def _code_row(columns, across, UNIT: tl.constexpr):
    """Bytes of four-bit codes in a row, and of these with its blocks' scales."""
    half = tl.multiple_of((columns + 1) // 2, UNIT)
    return half, tl.multiple_of(half + across, UNIT)


@triton.jit
def _group(row, block, columns, SIZE: tl.constexpr, GROUP: tl.constexpr):
    """Place of blocks' fp32 scale in a piece."""
    return row * ((columns + GROUP * SIZE - 1) // (GROUP * SIZE)) + block // GROUP


@triton.jit
def write_pairs(
    values, codes, scales, middles, table, piece_of,
    MIDDLES: tl.constexpr, SIZE: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr,
    VECTOR: tl.constexpr, UNIT: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Write codes and 8-bit scales of BLOCKS blocks of SIZE, over the ends of rows; scales have their groups' amax.

    GROUP blocks of a row share an amax. A code is the number of MIDDLES that a scaled value exceeds, 7 for 0.
    SPAN is the power of two from SIZE on. With VECTOR, row lengths and offsets are multiples of 16 elements. The bytes
    of a row's codes, the bytes of its scales, and their offsets are multiples of UNIT.
    Columns of the table: where values, codes and scales begin; columns, blocks, the first program.
    """
    program = tl.program_id(0)
    piece = table + tl.load(piece_of + program).to(tl.int64) * 6
    columns = tl.load(piece + 3).to(tl.int32)
    if VECTOR:
        columns = tl.multiple_of(columns, 16)
    across = (columns + SIZE - 1) // SIZE
    index = (program - tl.load(piece + 5).to(tl.int32)) * BLOCKS + tl.arange(0, BLOCKS)
    present = index < tl.load(piece + 4).to(tl.int32)
    row, block = (index // across).to(tl.int64), index % across
    group_at = tl.load(piece + 2) + _group(row, block, columns, SIZE, GROUP)
    group = tl.load(scales + group_at, mask=present, other=0.0)
    bad = (group.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= 0x7F800000
    group_bits = tl.where(bad, 0x7FC00000, group.to(tl.int32, bitcast=True))
    tl.store(scales + group_at, group_bits.to(tl.float32, bitcast=True), mask=present & (block % GROUP == 0))
    inside = tl.arange(0, SPAN)
    column = (block * SIZE)[:, None] + inside[None, :]
    mask = present[:, None] & (column < columns) & (inside < SIZE)[None, :]
    x = _read(values + _begin(piece, 0, VECTOR), (row * columns)[:, None] + column, mask, TYPE)
    largest = tl.where(bad, 0.0, tl.max(tl.abs(x), 1))
    # In 255ths of the group's amax, squared.
    root = tl.sqrt_rn(tl.div_rn(largest, tl.where(bad | (group == 0.0), 1.0, group)))
    step = tl.minimum(tl.ceil(root * 255.0), 255.0)
    factor = step * step * 1.5378700499807768e-05 * tl.where(bad, 0.0, group)
    up = tl.div_rn(1.0, tl.where(factor == 0.0, 1.0, factor))
    up = tl.minimum(up, 3.4028234663852886e38)
    y = x * up[:, None]
    code = tl.zeros([BLOCKS, SPAN], tl.int32)
    for middle in tl.static_range(MIDDLES):
        code += (y > tl.load(middles + middle)).to(tl.int32)
    # Past the end of a row is the code of zero.
    code = tl.where(bad[:, None], 0, code)
    code = tl.where(column < columns, code, 7)
    low, high = tl.split(tl.reshape(code, [BLOCKS, SPAN // 2, 2]))
    half, stride = _code_row(columns, across, UNIT)
    codes += tl.multiple_of(tl.load(piece + 1), UNIT)
    at = row * stride
    pair = tl.arange(0, SPAN // 2)
    pair_at = (block * (SIZE // 2))[:, None] + pair[None, :]
    pair_mask = present[:, None] & (pair_at < half) & (pair < SIZE // 2)[None, :]
    tl.store(codes + at[:, None] + pair_at, (low | (high << 4)).to(tl.uint8), mask=pair_mask)
    tl.store(codes + at + half + block, step.to(tl.uint8), mask=present)


@triton.jit
def read_pairs(
    codes, scales, out, levels, table, piece_of,
    SIZE: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr, VECTOR: tl.constexpr, UNIT: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """Write the values of PAIRS bytes of codes, over the ends of rows. With VECTOR rows have an even number of columns.

    UNIT bytes of codes at a time, which do not cross the end of a row; see `write_pairs`.
    Columns of the table: where values, codes and scales begin; columns, bytes of codes, the first program.
    """
    program = tl.program_id(0)
    piece = table + tl.load(piece_of + program).to(tl.int64) * 6
    columns, pairs = tl.load(piece + 3).to(tl.int32), tl.multiple_of(tl.load(piece + 4).to(tl.int32), UNIT)
    half, stride = _code_row(columns, (columns + SIZE - 1) // SIZE, UNIT)
    first = (program - tl.load(piece + 5).to(tl.int32)) * PAIRS
    pair = first + UNIT * tl.arange(0, PAIRS // UNIT)
    row = pair // half
    inside = tl.multiple_of(pair - row * half, [UNIT])[:, None] + tl.arange(0, UNIT)[None, :]
    mask = (pair < pairs)[:, None] & (inside < half)
    row = row.to(tl.int64)[:, None]
    if SIZE % (2 * UNIT) == 0:  # one block has them all
        block, present = 2 * (pair[:, None] - row * half) // SIZE, (pair < pairs)[:, None]
    else:
        block, present = 2 * inside // SIZE, mask
    codes += tl.multiple_of(tl.load(piece + 1), UNIT)
    byte = tl.load(codes + (row * stride + inside), mask=mask, other=0).to(tl.int32)
    step = tl.load(codes + (row * stride + half + block), mask=present, other=0)
    group_at = tl.load(piece + 2) + _group(row, block, columns, SIZE, GROUP)
    group = tl.load(scales + group_at, mask=present, other=0.0)
    step = step.to(tl.float32)
    factor = step * step * 1.5378700499807768e-05 * group
    low = tl.load(levels + (byte & 15)) * factor
    high = tl.load(levels + (byte >> 4)) * factor
    out += _begin(piece, 0, VECTOR)
    if VECTOR:  # values of consecutive pairs lie together
        out += 2 * first.to(tl.int64)
        both = tl.arange(0, 2 * PAIRS)
        values = tl.reshape(tl.interleave(low, high), [2 * PAIRS])
        _write(out + both, values, both < 2 * (pairs - first), TYPE)
    else:
        where = out + row * columns + 2 * inside
        _write(where, low, mask, TYPE)
        _write(where + 1, high, mask & (2 * inside + 1 < columns), TYPE)
