# ruff: noqa: N803  # constants of a kernel are in capitals
# mypy: ignore-errors
# (Triton has no types, and may be absent where this is checked.)
"""Triton kernels; imported only where Triton is to be used.

    quantized_adamw    one program for each tile of every stretch: decode, average, update, encode in one pass
    wide_adamw         AdamW with fp32 moments over the runs of a plan, parameters and gradients of any width

Both find their tensors by address in a table, so that one launch does all of them, read the step's scalars from the
device, and write nothing where the flag says that the step is to be skipped. Every product and sum is rounded by
itself (launch with ``enable_fp_fusion=False``), divisions and roots are the correctly rounded ones, so that codes and
parameters are those of the torch ops. bf16 is handled by its bits, rounded to nearest even or stochastically.
"""

import triton
import triton.language as tl

power_of_two = triton.next_power_of_2

# Element types, as arguments name them: 0 fp32, 1 bf16, 2 fp16.
# Columns of the table of stretches: the addresses of parameter, gradient, first and second states and their scales (or
# 0); rows, columns, the first program, the class, the first element in the global tensor, two keys, one unused.
# Columns of the table of scalars: decay, beta1, 1 - beta1 (negative to ascend), beta2, 1 - beta2, eps, step size, root.


@triton.jit
def _load(address, offset, mask, TYPE: tl.constexpr):
    """Elements of one of the three types, as fp32."""
    if TYPE == 0:
        return tl.load(address.to(tl.pointer_type(tl.float32)) + offset, mask=mask, other=0.0)
    elif TYPE == 1:
        bits = tl.load(address.to(tl.pointer_type(tl.int16)) + offset, mask=mask, other=0)
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return tl.load(address.to(tl.pointer_type(tl.float16)) + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _mix(x):
    """The 32-bit mixer of `core.rounding`, on uint32."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _store(
    address,
    offset,
    value,
    mask,
    TYPE: tl.constexpr,
    ROUND: tl.constexpr,
    element,
    first_key,
    second_key,
    step,
):
    """Write fp32 values as one of the three types; bf16 stochastically if ROUND."""
    if TYPE == 0:
        tl.store(address.to(tl.pointer_type(tl.float32)) + offset, value, mask=mask)
    elif TYPE == 1:
        bits = value.to(tl.int32, bitcast=True)
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000  # adding to it would make it infinity or zero
        quiet = bits | 0x400000
        if ROUND:
            index = element + offset
            low = (index & 0xFFFFFFFF).to(tl.uint32)
            high = (index >> 32).to(tl.uint32)
            x = _mix(low + first_key.to(tl.uint32))
            x = _mix(x ^ second_key.to(tl.uint32) ^ _mix(high * 0x9E3779B9 + step.to(tl.uint32)))
            bits += (x & 0xFFFF).to(tl.int32)
        else:
            bits += 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(is_nan, quiet, bits)
        tl.store(address.to(tl.pointer_type(tl.int16)) + offset, (bits >> 16).to(tl.int16), mask=mask)
    else:
        tl.store(address.to(tl.pointer_type(tl.float16)) + offset, value.to(tl.float16), mask=mask)


@triton.jit
def _nearest(bits, limits, low, high, base, key_shift: tl.constexpr):
    """The table look-up of `codec.Table`: base[key] + (bits > limit[key])."""
    key = tl.minimum(tl.maximum(bits >> key_shift, low), high) - low
    return tl.load(base + key) + (bits > tl.load(limits + key)).to(tl.int32)


@triton.jit
def quantized_adamw(
    table, rates, counts, stretch_of, flag,
    first_values, first_base, first_limit, second_values, second_base, second_limit,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, ROW_SPAN: tl.constexpr, COLUMN_SPAN: tl.constexpr,
    PARAM_TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr, ROUND: tl.constexpr,
    ROOT_MAP: tl.constexpr,
    FIRST_SHIFT: tl.constexpr, FIRST_OFFSET: tl.constexpr, FIRST_ZERO: tl.constexpr, FIRST_TOP: tl.constexpr,
    SECOND_SHIFT: tl.constexpr, SECOND_OFFSET: tl.constexpr, SECOND_ZERO: tl.constexpr, SECOND_TOP: tl.constexpr,
    FIRST_LOW: tl.constexpr, SECOND_LOW: tl.constexpr, HIGH: tl.constexpr, KEY_SHIFT: tl.constexpr,
    ZERO_CODE: tl.constexpr, CELLS: tl.constexpr,
    SCALE_MIN: tl.constexpr, SCALE_MAX: tl.constexpr, SQUARE_MIN: tl.constexpr, SQUARE_MAX: tl.constexpr,
):  # fmt: skip
    """One AdamW step of one tile. `table` and `rates` have the columns named above, `stretch_of` a row each program."""
    program = tl.program_id(0)
    row = table + tl.load(stretch_of + program).to(tl.int64) * 14
    columns = tl.load(row + 7)
    tile = program - tl.load(row + 8)
    across = (columns + TILE_COLUMNS - 1) // TILE_COLUMNS
    down = tl.arange(0, ROW_SPAN)[:, None]
    right = tl.arange(0, COLUMN_SPAN)[None, :]
    i = tile // across * TILE_ROWS + down
    j = tile % across * TILE_COLUMNS + right
    offset = i * columns + j
    mask = (down < TILE_ROWS) & (right < TILE_COLUMNS) & (i < tl.load(row + 6)) & (j < columns)
    kind = tl.load(row + 9)
    rate = rates + kind * 8
    skip = tl.load(flag)
    writes = mask & (tl.zeros_like(offset).to(tl.float32) + skip == 0.0)

    # Decode.
    first_scale = tl.load(row + 4).to(tl.pointer_type(tl.float32)) + tile
    second_scale = tl.load(row + 5).to(tl.pointer_type(tl.float32)) + tile
    first_codes = tl.load(row + 2).to(tl.pointer_type(tl.uint8)) + offset
    second_codes = tl.load(row + 3).to(tl.pointer_type(tl.uint8)) + offset
    code = tl.load(first_codes, mask=mask, other=0).to(tl.int32)
    if ROOT_MAP:
        m = (((code & 127) + FIRST_OFFSET) << FIRST_SHIFT).to(tl.float32, bitcast=True) - FIRST_ZERO
        m = (m.to(tl.int32, bitcast=True) | ((code & 128) << 24)).to(tl.float32, bitcast=True)
    else:
        m = tl.load(first_values + code)
    old_first_scale = tl.load(first_scale)
    old_second_scale = tl.load(second_scale)
    m = m * old_first_scale
    code = tl.load(second_codes, mask=mask, other=0).to(tl.int32)
    if ROOT_MAP:
        v = ((code + SECOND_OFFSET) << SECOND_SHIFT).to(tl.float32, bitcast=True) - SECOND_ZERO
        v = v * old_second_scale
        v = v * v
    else:
        v = tl.load(second_values + code) * old_second_scale

    # Average, and update.
    g = _load(tl.load(row + 1), offset, mask, GRAD_TYPE)
    m = m * tl.load(rate + 1) + g * tl.load(rate + 2)
    v = v * tl.load(rate + 3) + g * g * tl.load(rate + 4)
    v = tl.minimum(tl.maximum(v, SQUARE_MIN), SQUARE_MAX)
    root = tl.div_rn(1.0, tl.sqrt_rn(v)) * v
    update = tl.div_rn(m * tl.load(rate + 6), tl.div_rn(root, tl.load(rate + 7)) + tl.load(rate + 5))
    address = tl.load(row)
    p = _load(address, offset, mask, PARAM_TYPE) * tl.load(rate) - update
    step = tl.load(counts + kind).to(tl.int64)
    _store(
        address, offset, p, writes, PARAM_TYPE, ROUND, tl.load(row + 10), tl.load(row + 11) + step * 0x9E3779B9,
        tl.load(row + 12), step,
    )  # fmt: skip

    # Encode.
    m = tl.where(mask, m, 0.0)
    kept = v
    if ROOT_MAP:
        kept = root
    kept = tl.where(mask, kept, 0.0)
    scale = tl.div_rn(tl.max(tl.max(tl.abs(m), 1), 0), FIRST_TOP)
    scale = tl.minimum(tl.maximum(scale, SCALE_MIN), SCALE_MAX)
    tl.store(first_scale, tl.where(skip == 0.0, scale, old_first_scale))
    bits = tl.div_rn(m, scale).to(tl.int32, bitcast=True)
    if ROOT_MAP:
        magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True) + FIRST_ZERO
        code = magnitude.to(tl.int32, bitcast=True) + (
            (1 << (FIRST_SHIFT - 1)) - (FIRST_OFFSET << FIRST_SHIFT)
        )
        code = tl.minimum(tl.maximum(code >> FIRST_SHIFT, 0), 127) | ((bits >> 24) & 128)
    else:
        sign = bits >> 31
        bits &= 0x7FFFFFFF
        side = sign & CELLS
        code = _nearest(bits, first_limit + side, FIRST_LOW, HIGH, first_base + side, KEY_SHIFT)
        code = (code ^ sign) - sign + ZERO_CODE
    tl.store(first_codes, code.to(tl.uint8), mask=writes)
    scale = tl.div_rn(tl.max(tl.max(kept, 1), 0), SECOND_TOP)
    scale = tl.minimum(tl.maximum(scale, SCALE_MIN), SCALE_MAX)
    tl.store(second_scale, tl.where(skip == 0.0, scale, old_second_scale))
    ratio = tl.div_rn(kept, scale)
    if ROOT_MAP:
        code = (ratio + SECOND_ZERO).to(tl.int32, bitcast=True)
        code += (1 << (SECOND_SHIFT - 1)) - (SECOND_OFFSET << SECOND_SHIFT)
        code = tl.minimum(tl.maximum(code >> SECOND_SHIFT, 0), 255)
    else:
        bits = ratio.to(tl.int32, bitcast=True)
        code = _nearest(bits, second_limit, SECOND_LOW, HIGH, second_base, KEY_SHIFT)
    tl.store(second_codes, code.to(tl.uint8), mask=writes)


@triton.jit
def wide_adamw(
    table, rates, counts, stretch_of, flag,
    BLOCK: tl.constexpr, PARAM_TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """One AdamW step of BLOCK elements of a run, with fp32 moments; a run is a stretch of one row (`COLUMNS`)."""
    program = tl.program_id(0)
    row = table + tl.load(stretch_of + program).to(tl.int64) * 14
    offset = (program - tl.load(row + 8)) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < tl.load(row + 7)
    kind = tl.load(row + 9)
    rate = rates + kind * 8
    writes = mask & (tl.zeros_like(offset).to(tl.float32) + tl.load(flag) == 0.0)
    firsts = tl.load(row + 2).to(tl.pointer_type(tl.float32)) + offset
    seconds = tl.load(row + 3).to(tl.pointer_type(tl.float32)) + offset
    g = _load(tl.load(row + 1), offset, mask, GRAD_TYPE)
    m = tl.load(firsts, mask=mask, other=0.0) * tl.load(rate + 1) + g * tl.load(rate + 2)
    v = tl.load(seconds, mask=mask, other=0.0) * tl.load(rate + 3) + g * g * tl.load(rate + 4)
    denominator = tl.div_rn(tl.sqrt_rn(v), tl.load(rate + 7)) + tl.load(rate + 5)
    address = tl.load(row)
    p = _load(address, offset, mask, PARAM_TYPE) * tl.load(rate)
    p -= tl.div_rn(m * tl.load(rate + 6), denominator)
    tl.store(firsts, m, mask=writes)
    tl.store(seconds, v, mask=writes)
    step = tl.load(counts + kind).to(tl.int64)
    _store(
        address, offset, p, writes, PARAM_TYPE, ROUND, tl.load(row + 10), tl.load(row + 11) + step * 0x9E3779B9,
        tl.load(row + 12), step,
    )  # fmt: skip
