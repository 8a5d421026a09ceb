"""On a CUDA device: the kernel against the torch ops, torch's own numbers, bandwidth.

None of this has been run where there is no device; the same kernels run in Triton's interpreter in test_kernels.py.
"""

import os

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


def bandwidth(make, dtype, bytes_per_element, numel=1 << 27):
    """Share of the device's copy bandwidth that a step reaches."""
    p = torch.nn.Parameter(torch.zeros(numel // 1024, 1024, dtype=dtype, device="cuda"))
    p.grad = torch.ones_like(p)
    optimizer, other = make([("p", p)]), torch.empty_like(p)

    def timed(call):
        for _ in range(3):
            call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(20):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 20e3

    copied = 2 * p.numel() * p.element_size() / timed(lambda: other.copy_(p.detach()))
    return bytes_per_element * p.numel() / timed(lambda: optimizer.step(grad_norm=1.0)) / copied


@pytest.mark.skipif(not os.environ.get("BANDWIDTH"), reason="BANDWIDTH=1 prints shares of the copy limit")
def test_a_step_moves_no_more_bytes_than_a_copy_could():
    """Prints each share; more than a whole copy would mean bytes counted that did not move."""
    shares = {}
    shares["AdamW fused fp32"] = bandwidth(lambda n: AdamW(n, fused=True), torch.float32, 28)
    for block in (Elements(256), Tile(32, 32), Tile(128, 128)):
        for dtype, nbytes in ((torch.float32, 16), (torch.bfloat16, 10)):
            share = bandwidth(lambda n, b=block: AdamW8bit(n, block=b), dtype, nbytes)
            shares[f"AdamW8bit {block} {dtype}"] = share
    print(*(f"{name}: {share:.2f}" for name, share in shares.items()), sep="\n")
    assert all(0 < share < 1.1 for share in shares.values())
