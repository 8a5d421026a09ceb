# mypy: disable-error-code="import-untyped, import-not-found"
"""Run by test_kernels.py in a process of its own: Triton's interpreter must be chosen before Triton is imported.

Compares whole optimizers, once by torch ops and once by kernels, to the bit.
"""

import sys

import torch
import triton
import triton.language as tl

from block_optim import AdamW, AdamW8bit
from block_optim.adam import kernels_triton, launch, rule
from block_optim.adam.q8 import rule as q8_rule
from block_optim.core import device as devices
from layout_planner import Elements, Tile
from ragged_shard.testing import OnItsWay

SHAPES = [(40, 70), (64, 64), (2, 20, 24)]


def run(kernels, make, dtype, skip=False):
    """Parameters and states after three steps, the last one to be skipped if ``skip``."""
    for module in (launch, rule, q8_rule):
        vars(module)["has_kernels"] = lambda device: kernels
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
        if kernels and step == 2 and skip:
            optimizer.found_inf = torch.tensor(1.0)
            with devices.stand_in(OnItsWay):
                optimizer.step()
            assert optimizer.skipped_steps == 1
        elif not (skip and step == 2):
            optimizer.step()
    found = [p.detach() for p in params]
    return found + [value for p in params for value in optimizer.state[p].values()]


def same(name, make, dtype, skip=False):
    """Raise unless both ways agree."""
    for a, b in zip(run(False, make, dtype, skip), run(True, make, dtype, skip), strict=True):
        assert torch.equal(a, b), f"{name} {dtype}: {int((a != b).sum())} of {a.numel()} elements differ"
    print("same bits:", name, dtype, "skipped" if skip else "")


def eight_bit(**options):
    """AdamW8bit with every tensor in 8 bits."""
    return lambda named: AdamW8bit(named, lr=1e-2, min_8bit_numel=1, **options)


def close(name, dtype):
    """The kernel for narrow parameters against fp64 arithmetic: rounded to bf16 it is at most one step off."""

    def rounded(kernels):
        return run(kernels, lambda named: AdamW(named, lr=1e-2, fused=True), dtype)[: len(SHAPES)]

    for a, b in zip(rounded(False), rounded(True), strict=True):
        apart = (a.view(torch.int16).int() - b.view(torch.int16).int()).abs()
        assert apart.max() <= 1, f"{name}: {apart.max()} steps apart"
        assert (apart > 0).float().mean() < 0.01
    print("close:", name, dtype)


@triton.jit
def _store_values(values, out, SIZE: tl.constexpr, TYPE: tl.constexpr, ROUND: tl.constexpr):
    offset = tl.arange(0, SIZE)
    keys = tl.zeros_like(offset).to(tl.int64)
    kernels_triton._store(
        tl.load(out),
        offset,
        tl.load(values + offset),
        offset < SIZE,
        TYPE,
        ROUND,
        keys,
        keys + 77,
        keys + 5,
        keys,
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
    same("dynamic", eight_bit(block=Elements(256), state_map="dynamic"), torch.float32)
    same("bf16", eight_bit(block=Tile(16, 32)), torch.bfloat16)
    same("stochastic", eight_bit(block=Elements(512), stochastic_rounding=True, seed=3), torch.bfloat16)
    same("fp16", eight_bit(block=Elements(512)), torch.float16)
    same("flag", eight_bit(block=Elements(512)), torch.float32, skip=True)
    close("wide", torch.bfloat16)
    stays_nan(False)
    stays_nan(True)
    sys.exit(0)
