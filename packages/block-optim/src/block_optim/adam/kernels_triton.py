# ruff: noqa: N803  # constants of a kernel are in capitals
# mypy: ignore-errors
# (Triton has no types, and may be absent where this is checked.)
"""Triton kernel for AdamW with fp32 moments, and what it shares with the one for 8-bit moments (`q8.kernels_triton`).

    wide_adamw         over the runs of a plan, parameters and gradients of any width

Imported only where Triton is used; `variants` has the constants, the sizes of programs and the number of warps.

The kernels find their tensors by address in a table, so that one launch does many of them, read the step's scalars from
the device, and write nothing if the flag is set. Every product and sum is rounded separately (launch with
``enable_fp_fusion=False``), divisions and roots are the correctly rounded ones, so that codes and parameters are those
of the torch ops. Triton's interpreter, which rounds bf16 wrongly and runs no assembly, gets the same numbers in other
ways: bf16 by its bits, reciprocals as divisions.

With VECTOR > 1 a launch promises that addresses are multiples of 16 bytes (codes: 8) and that rows, tiles and runs are
multiples of VECTOR elements; only then does Triton load and store 8 or 16 bytes at a time.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

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
def wide_adamw(
    table, rates, counts, row_of, flag,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr,
    PARAM_TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """One AdamW step of BLOCK elements of a run, with fp32 moments; a run is a stretch of one row."""
    program = tl.program_id(0)
    row = table + tl.load(row_of + program) * 14
    skip = tl.load(flag)
    start = (program - tl.load(row + 8)) * BLOCK
    numel, kind = tl.multiple_of(tl.load(row + 7), VECTOR), tl.load(row + 9).to(tl.int32)
    param, grad, first, second = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    if skip != 0.0:
        return
    rate = rates + kind * 8
    j = tl.arange(0, BLOCK)
    mask = start + j < numel
    g = _load(grad, start + j, mask, GRAD_TYPE, VECTOR)
    m = _load(first, start + j, mask, 0, VECTOR) * tl.load(rate + 1) + g * tl.load(rate + 2)
    v = _load(second, start + j, mask, 0, VECTOR) * tl.load(rate + 3) + g * g * tl.load(rate + 4)
    step = tl.load(counts + kind).to(tl.int64)
    p = _load(param, start + j, mask, PARAM_TYPE, VECTOR)
    update = tl.div_rn(m * tl.load(rate + 6), tl.sqrt_rn(v) + tl.load(rate + 5))
    _update(param, start, j, p, update, rate, row, step, mask, PARAM_TYPE, VECTOR, ROUND)
    _store(first, start + j, m, mask, 0, VECTOR, False, 0)
    _store(second, start + j, v, mask, 0, VECTOR, False, 0)
