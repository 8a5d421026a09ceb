"""Codes of 8 bits and the grid of their scales."""

import pytest
import torch

from block_optim import AdamW8bit
from layout_planner import Elements, Tile


def steps_to_one(count):
    """That many floating-point steps with 5 bits of mantissa, the last of which is 1."""
    return (((127 << 5) + torch.arange(1 - count, 1)) << 18).to(torch.int32).view(torch.float32)


def test_states_are_the_nearest_of_the_documented_codes():
    moments = steps_to_one(128) - steps_to_one(128)[0]
    roots = steps_to_one(256) - steps_to_one(257)[0]
    p = torch.nn.Parameter(torch.zeros(32, 256))
    p.grad = torch.randn(32, 256).mul(torch.logspace(-4, 0, 256)).clamp(-1, 1)
    optimizer = AdamW8bit([p], block=Elements(256))
    optimizer.step()
    state = optimizer.state[p]
    signs = 1 - 2 * (state["exp_avg"] >> 7).float()
    numbers = {"exp_avg": 0.1 * p.grad * signs, "exp_avg_sq": (0.001 * p.grad.square()).sqrt()}
    for (key, number), values, mask in zip(numbers.items(), (moments, roots), (127, 255), strict=True):
        units = number / state[f"{key}_scale"].view(32, 1)
        error = (values[state[key].int() & mask] - units).abs()
        assert (error <= (values - units[..., None]).abs().amin(-1) + 1e-6).all()
        assert units.amax(1).sub(values[-1]).abs().max() < 1e-6
    assert 0 < roots[0] < 1.3e-4
    far = roots > 0.01
    assert (roots[far].diff() / roots[far][:-1]).max() / 2 < 0.0225


@pytest.mark.parametrize("block", [Elements(256), Tile(32, 32), Tile(128, 128)], ids=str)
def test_columns_of_any_size_keep_updates_small(block):
    torch.manual_seed(0)
    scales = torch.logspace(-4, 4, 256)[torch.randperm(256)]
    p = torch.nn.Parameter(torch.zeros(256, 256))
    optimizer = AdamW8bit([p], lr=1.0, weight_decay=0.0, block=block)
    for _ in range(30):
        before = p.detach().clone()
        p.grad = torch.randn(256, 256) * scales
        optimizer.step()
        assert (p.detach() - before).abs().max() < 10


@pytest.mark.parametrize(
    ("block", "shape", "full"),
    [(Tile(32, 32), (40, 70), (64, 96)), (Elements(96), (30, 95), (31, 95))],
    ids=["tile", "elements"],
)
def test_a_short_block_is_as_if_zeros_followed(block, shape, full):
    big, small = torch.nn.Parameter(torch.zeros(full)), torch.nn.Parameter(torch.ones(shape))
    with torch.no_grad():
        big[: shape[0], : shape[1]] = 1
    optimizer = AdamW8bit([big, small], min_8bit_numel=1, block=block)
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(shape, generator=generator)
    # The second all but cancels the first moment: what is left elsewhere would show.
    for factor in (1.0, -0.9, 0.01):
        small.grad = first * factor
        big.grad = torch.zeros(full)
        big.grad[: shape[0], : shape[1]] = small.grad
        optimizer.step()
    assert torch.equal(small, big[: shape[0], : shape[1]])
