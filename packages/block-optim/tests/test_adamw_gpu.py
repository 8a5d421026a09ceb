"""On a CUDA device: the kernel against the torch ops, torch's own numbers, bandwidth.

None of this has been run where there is no device; the same kernels run in Triton's interpreter in test_kernels.py.
"""

import pytest
import torch

from block_optim import AdamW, AdamW8bit
from layout_planner import Elements, Tile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = [(1000, 700), (512, 512), (3, 96, 128)]


def run(device, make, dtype=torch.float32, steps=4):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype).to(device)) for s in SHAPES]
    optimizer = make([(f"p{i}", p) for i, p in enumerate(params)])
    for _ in range(steps):
        for p in params:
            grad = torch.randn(p.shape, generator=generator) * torch.logspace(-3, 3, p.shape[-1])
            p.grad = grad.to(dtype).to(device)
        optimizer.step()
    states = [value for p in params for value in optimizer.state[p].values()]
    return [t.detach().cpu() for t in [*params, *states]], optimizer


@pytest.mark.parametrize("block", [Elements(256), Tile(32, 32), Tile(128, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stochastic", [False, True])
def test_the_8_bit_kernel_gives_the_bits_of_the_cpu_ops(block, dtype, stochastic):
    def make(named):
        return AdamW8bit(named, lr=1e-2, block=block, stochastic_rounding=stochastic)

    for a, b in zip(run("cpu", make, dtype)[0], run("cuda", make, dtype)[0], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("fused", [False, True])
def test_adamw_gives_the_bits_of_torchs_kernels(fused):
    ours, _ = run("cuda", lambda named: AdamW(named, lr=1e-2, fused=fused))
    theirs, _ = run(
        "cuda",
        lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2, fused=fused, foreach=not fused),
    )
    for a, b in zip(ours[: len(SHAPES)], theirs, strict=False):
        assert torch.equal(a, b)


@pytest.mark.parametrize("make", [AdamW8bit, AdamW])
def test_bad_gradients_are_skipped_and_counted(make):
    _, optimizer = run("cuda", make)
    params = [p for g in optimizer.param_groups for p in g["params"]]
    before = [p.detach().clone() for p in params]
    params[0].grad[3, 4] = float("nan")
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
    assert all(int(optimizer.state[p]["step"]) == 4 for p in params)
