"""Run by test_kernels.py in a process of its own: Triton's interpreter must be chosen before Triton is imported.

Compares whole optimizers, once by torch ops and once by kernels, to the bit.
"""

import sys

import torch

from block_optim import AdamW, AdamW8bit
from block_optim.adam import launch, rule
from block_optim.adam.q8 import rule as q8_rule
from layout_planner import Elements, Tile

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
            active = optimizer._collector.collect(list(optimizer._params.values()))
            active.found_inf = torch.tensor(1.0)
            optimizer.update(active)
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


if __name__ == "__main__":
    same("elements", eight_bit(block=Elements(256)), torch.float32)
    same("tiles", eight_bit(block=Tile(32, 32), maximize=True), torch.float32)
    same("dynamic", eight_bit(block=Elements(256), state_map="dynamic"), torch.float32)
    same("bf16", eight_bit(block=Tile(16, 32)), torch.bfloat16)
    same("stochastic", eight_bit(block=Elements(512), stochastic_rounding=True, seed=3), torch.bfloat16)
    same("fp16", eight_bit(block=Elements(512)), torch.float16)
    same("flag", eight_bit(block=Elements(512)), torch.float32, skip=True)
    close("wide", torch.bfloat16)
    sys.exit(0)
