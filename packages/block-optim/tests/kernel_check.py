# mypy: disable-error-code="import-untyped, import-not-found"
"""Run by test_kernels.py in a process of its own: Triton's interpreter must be chosen before Triton is imported.

Compares whole optimizers, once by torch ops and once by kernels, to the bit.
"""

import sys
import time

import torch
import triton
import triton.language as tl

from block_optim import AdamW8bit
from block_optim.adam.q8 import kernels_triton, rule
from layout_planner import Elements, Tile

SHAPES = [(40, 70), (64, 64), (2, 20, 24)]


def run(kernels, make, dtype):
    """Parameters and states after three steps."""
    vars(rule)["has_triton"] = lambda device: kernels
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]
    optimizer = make([(f"p{i}", p) for i, p in enumerate(params)])
    for step in range(3):
        for p in params:
            p.grad = (torch.randn(p.shape, generator=generator) * torch.logspace(-3, 3, p.shape[-1])).to(
                dtype
            )
        if step == 1:
            params[1].grad = None
        optimizer.step()
    found = [p.detach() for p in params]
    return found + [value for p in params for value in optimizer.state[p].values()]


START = time.thread_time()


def same(name, make, dtype):
    """Raise unless both ways agree."""
    for a, b in zip(run(False, make, dtype), run(True, make, dtype), strict=True):
        assert torch.equal(a, b), f"{name} {dtype}: {int((a != b).sum())} of {a.numel()} elements differ"
    print("same bits:", name, dtype, round(time.thread_time() - START, 1))


def eight_bit(**options):
    """AdamW8bit with every tensor in 8 bits."""
    return lambda named: AdamW8bit(named, lr=1e-2, min_8bit_numel=1, **options)


# As fp32's bits, and with the sign set: the GPU's NaN, the CPU's, one with a small payload; infinity; the largest and
# smallest numbers, the largest and smallest denormal ones, zero; what rounds up to infinity in bf16.
EXTREMES = (
    0x7FFFFFFF, 0x7FC00000, 0x7F810000, 0x7F800000, 0x7F7FFFFF, 0x00800000, 0x007FFFFF, 0x00010000, 0x1, 0, 0x7F7F8000,
)  # fmt: skip


def extreme_values(dtype):
    """The extremes in a dtype, NaN with the payloads given."""
    bits = torch.tensor([b | s for b in EXTREMES for s in (0, -(1 << 31))]).to(torch.int32)
    if dtype == torch.bfloat16:
        return (bits >> 16).to(torch.int16).view(torch.bfloat16)
    return bits.view(torch.float32)


def run_extremes(kernels, make, dtype):
    """The parameter and its states after steps in which gradients, weights and states have extremes.

    Of three rows each, one has an extreme in some gradients, one in some weights, one in its states.
    """
    vars(rule)["has_triton"] = lambda device: kernels
    values, generator = extreme_values(dtype), torch.Generator().manual_seed(0)
    shape = (3 * len(values), 256)
    p = torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
    optimizer = make([("p", p)])
    optimizer.skip_nonfinite = False
    for step in range(3):
        p.grad = torch.randn(shape, generator=generator).to(dtype)
        if step == 1:
            p.grad[::3, ::5] = values[:, None]
            p.detach()[1::3, ::7] = values[:, None]
            for name in ("exp_avg_scale", "exp_avg_sq_scale"):
                optimizer.state[p][name][2::3] = extreme_values(torch.float32)
        optimizer.step()
    return p.detach(), optimizer.state[p]


def same_or_nan(a, b):
    """Where two tensors have the same bits or are both NaN."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return (a.view(whole) == b.view(whole)) | (a.isnan() & b.isnan())


def extremes(name, make, dtype):
    """Raise unless kernels make of extremes what the torch ops make of them; codes of a NaN scale mean nothing."""
    (p, states), (q, others) = (run_extremes(kernels, make, dtype) for kernels in (False, True))
    assert same_or_nan(p, q).all(), f"{name}: {int((~same_or_nan(p, q)).sum())} parameters differ"
    for key in ("exp_avg", "exp_avg_sq"):
        scales, theirs = states[f"{key}_scale"], others[f"{key}_scale"]
        assert same_or_nan(scales, theirs).all(), f"{name}: {key}_scale"
        used = ~scales.isnan()
        assert 0 < used.sum() < len(used)
        assert torch.equal(states[key][used], others[key][used]), f"{name}: {key}"
    print("extremes:", name, dtype)


def huge_gradients(make):
    """Raise unless both ways move weights by Adam's step where gradients are too large for their squares."""
    found = []
    for kernels in (False, True):
        vars(rule)["has_triton"] = lambda device, kernels=kernels: kernels
        p = torch.nn.Parameter(torch.zeros(16, 256))
        optimizer = make([("p", p)])
        for huge in (1.0, 1e20, -3e38, 1.0):
            p.grad = torch.ones(16, 256)
            p.grad[::2, 3] = huge
            optimizer.step()
        found.append(p.detach())
    assert torch.equal(*found)
    assert found[0].abs().max() < 40 * optimizer.param_groups[0]["lr"]
    print("huge gradients")


@triton.jit
def _store_values(values, out, SIZE: tl.constexpr, TYPE: tl.constexpr, ROUND: tl.constexpr):
    offset = tl.arange(0, SIZE)
    random = (offset * 40503) & 0xFFFF
    kernels_triton._store(
        tl.load(out), offset, tl.load(values + offset), offset < SIZE, TYPE, 8, ROUND, random
    )


def stays_nan(rounds):
    """Every kind of NaN and infinity through the kernels' store, to bf16."""
    payloads = torch.randint(1, 1 << 23, (500,), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([1, 0xFFFF, 0x3FFFFF, 0x400000, 0x7FFFFF, 0, 0, 0, 0, 0, 0, 0])
    positive = 0x7F800000 | torch.cat([payloads, ends])
    values = torch.cat([positive, positive | -(1 << 31)]).to(torch.int32).view(torch.float32)
    out = torch.zeros(len(values), dtype=torch.bfloat16)
    _store_values[(1,)](values, torch.tensor([out.data_ptr()]), len(values), 1, rounds)
    assert torch.equal(out.isnan(), values.isnan())
    assert torch.equal(out[~out.isnan()].float(), values[~values.isnan()])
    print("NaN stays:", "stochastic" if rounds else "nearest")


if __name__ == "__main__":
    same("elements", eight_bit(block=Elements(256)), torch.float32)
    same("tiles", eight_bit(block=Tile(32, 32), maximize=True), torch.float32)
    same("bf16", eight_bit(block=Tile(16, 32)), torch.bfloat16)
    same("stochastic", eight_bit(block=Elements(512), stochastic_rounding=True), torch.bfloat16)
    same("fp16", eight_bit(block=Elements(512)), torch.float16)
    same("two passes", eight_bit(block=Elements(16384)), torch.float32)
    same("two passes, both sides cut", eight_bit(block=Tile(4, 1024)), torch.bfloat16)
    same("in two passes, bf16", eight_bit(block=Tile(128, 128)), torch.bfloat16)
    strict = {"block": Elements(256)}
    extremes("elements", eight_bit(**strict), torch.float32)
    huge_gradients(eight_bit(block=Elements(256)))
    extremes("nearest", eight_bit(**strict), torch.bfloat16)
    extremes("stochastic", eight_bit(**strict, stochastic_rounding=True), torch.bfloat16)
    stays_nan(False)
    stays_nan(True)
    sys.exit(0)
