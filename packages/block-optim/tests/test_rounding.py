"""Rounding fp32 to bf16: what is not a number stays so, and random bits belong to elements."""

import pytest
import torch

from block_optim.core.rounding import CHUNK, Rounder

# The GPU's NaN, the CPU's, the smallest and the largest payloads; infinities; the largest finite number and zeros.
EXTREMES = (0x7FFFFFFF, 0x7FC00000, 0x7F800001, 0x7F80FFFF, 0x7FBFFFFF, 0x7F800000, 0x7F7F0000, 0)


def with_both_signs(bits):
    return torch.cat([bits, bits | -(1 << 31)]).to(torch.int32)


def rounded(bits, step=1):
    out = torch.zeros(len(bits), dtype=torch.bfloat16)
    Rounder(len(bits), bits.device)(bits.clone().view(torch.float32), out, 0, "w", step, 0)
    return out


@pytest.mark.parametrize("step", [1, 2, 3])
def test_every_nan_stays_nan_whatever_its_payload_and_sign(step):
    payloads = torch.randint(1, 1 << 23, (1 << 16,), generator=torch.Generator().manual_seed(step))
    ends = torch.cat([torch.arange(1, 1 << 10), torch.arange((1 << 23) - (1 << 10), 1 << 23)])
    upper = torch.arange(1, 1 << 7) << 16  # with every upper half, an empty and a full lower one
    bits = with_both_signs(0x7F800000 | torch.cat([payloads, ends, upper, upper | 0xFFFF, upper - 1 | 1]))
    assert rounded(bits, step).isnan().all()


@pytest.mark.parametrize("step", range(8))
def test_infinities_zeros_and_numbers_that_bf16_has_stay_what_they_are(step):
    bits = with_both_signs(torch.tensor(EXTREMES))
    wide = bits.view(torch.float32)
    found = rounded(bits, step).float()
    assert torch.equal(found.isnan(), wide.isnan())
    assert torch.equal(found[~wide.isnan()], wide[~wide.isnan()])
    assert torch.equal(found[~wide.isnan()].signbit(), wide[~wide.isnan()].signbit())


def test_a_long_stretch_gets_the_bits_of_its_pieces_and_small_buffers_are_enough():
    wide = torch.randn(CHUNK + 100, generator=torch.Generator().manual_seed(0))
    start = (1 << 32) - 50  # the lower half of the index begins again within
    whole, pieces = torch.zeros(2, len(wide), dtype=torch.bfloat16).unbind()
    Rounder(len(wide), wide.device)(wide.clone(), whole, 7, "w", 3, start)
    small = Rounder(1000, wide.device)
    for low in range(0, len(wide), 70_001):
        small(wide[low : low + 70_001].clone(), pieces[low : low + 70_001], 7, "w", 3, start + low)
    assert torch.equal(whole, pieces)
