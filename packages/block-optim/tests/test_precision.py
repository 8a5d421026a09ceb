"""Weights narrower than fp32: updated in fp32 and rounded once, by every optimizer; stochastic rounding."""

import logging

import pytest
import runs
import torch
from runs import tensors

from block_optim.core.rounding import CHUNK, Rounder

SHAPES = ((24, 16), (13, 8), (3, 8, 6))
BF16 = torch.bfloat16
NAMES = ("AdamW", "AdamW fused", "AdamW8bit", "Muon", "NorMuon", "Shampoo", "SOAP")
every_kind = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR, "block_optim")


def run_of(name, layout="plain", dtype=BF16, shapes=SHAPES, **options):
    cautious = {"cautious_weight_decay": True} if name == "NorMuon" else {}
    own = {"shapes": shapes, "dtype": dtype, "lr": 0.02, "weight_decay": 0.1, **cautious}
    return runs.run_of(name, layout, **{**own, **options})


def give_bf16(run, number):
    """The gradients of a step as bf16 has them, in the parameters' dtype."""
    for p, grad in zip(run.params, tensors(run.shapes, number, BF16), strict=True):
        p.grad = grad.to(p.dtype)


@pytest.mark.parametrize(
    ("name", "lr"),
    [
        *((name, 0.02) for name in NAMES if "Muon" not in name),
        *((name, torch.tensor(0.02)) for name in ("AdamW", "SOAP")),
    ],
)
def test_a_step_of_bf16_weights_is_that_of_fp32_ones_rounded_once(name, lr):
    options = {"lr": lr, "weight_decay": 0.4}
    narrow, wide = run_of(name, **options), run_of(name, dtype=torch.float32, **options)
    for number in range(4):
        for p, w in zip(narrow.params, wide.params, strict=True):
            w.data.copy_(p.data)
        for run in (narrow, wide):
            give_bf16(run, number)
            run.optimizer.step()
        for p, w in zip(narrow.params, wide.params, strict=True):
            assert torch.equal(p, w.bfloat16())


@every_kind
def test_weights_rounded_at_random_decay_by_what_nearest_rounding_would_lose(name):
    one_block = {"max_preconditioner_dim": 64} if name in ("Shampoo", "SOAP") else {}
    run = run_of(name, shapes=((64, 64),), stochastic_rounding=True, **one_block)
    run.params[0].data.fill_(1)
    for _ in range(25):
        run.params[0].grad = torch.zeros_like(run.params[0])
        run.optimizer.step()
    assert float(run.params[0].float().mean().detach()) == pytest.approx(0.998**25, abs=2e-3)


@every_kind
def test_stochastic_rounding_leaves_fp32_parameters_as_they_are(name):
    plain, rounded = (run_of(name, dtype=torch.float32, stochastic_rounding=on) for on in (False, True))
    for number in range(2):
        for run in (plain, rounded):
            give_bf16(run, number)
            run.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(rounded.params, plain.params, strict=True))


# The GPU's NaN, the CPU's, the smallest and the largest payloads; infinities; the largest finite number and zeros.
EXTREMES = (0x7FFFFFFF, 0x7FC00000, 0x7F800001, 0x7F80FFFF, 0x7FBFFFFF, 0x7F800000, 0x7F7F0000, 0)


def with_both_signs(bits):
    return torch.cat([bits, bits | -(1 << 31)]).to(torch.int32)


def rounded(bits, step=1):
    out = torch.zeros(len(bits), dtype=torch.bfloat16)
    Rounder(len(bits), bits.device)(bits.clone().view(torch.float32), out, "w", step, 0)
    return out


@pytest.mark.parametrize("step", [1, 2, 3])
def test_every_nan_stays_nan_whatever_its_payload_and_sign(step):
    payloads = torch.randint(1, 1 << 23, (1 << 16,), generator=torch.Generator().manual_seed(step))
    ends = torch.cat([torch.arange(1, 1 << 10), torch.arange((1 << 23) - (1 << 10), 1 << 23)])
    upper = torch.arange(1, 1 << 7) << 16  # with every upper half, an empty and a full lower one
    bits = with_both_signs(0x7F800000 | torch.cat([payloads, ends, upper, upper | 0xFFFF, upper - 1 | 1]))
    assert rounded(bits, step).isnan().all()


def test_infinities_zeros_and_numbers_that_bf16_has_stay_what_they_are():
    bits = with_both_signs(torch.tensor(EXTREMES))
    wide = bits.view(torch.float32)
    for step in range(8):
        found = rounded(bits, step).float()
        assert torch.equal(found.isnan(), wide.isnan())
        assert torch.equal(found[~wide.isnan()], wide[~wide.isnan()])
        assert torch.equal(found[~wide.isnan()].signbit(), wide[~wide.isnan()].signbit())


def test_a_long_stretch_gets_the_bits_of_its_pieces_and_small_buffers_are_enough():
    wide = torch.randn(CHUNK + 100, generator=torch.Generator().manual_seed(0))
    start = (1 << 32) - 50  # the lower half of the index begins again within
    whole, pieces = torch.zeros(2, len(wide), dtype=torch.bfloat16).unbind()
    Rounder(len(wide), wide.device)(wide.clone(), whole, "w", 3, start)
    small = Rounder(1000, wide.device)
    for low in range(0, len(wide), 70_001):
        small(wide[low : low + 70_001].clone(), pieces[low : low + 70_001], "w", 3, start + low)
    assert torch.equal(whole, pieces)
    assert ((whole.float() - wide).abs() <= wide.abs() / 128).all()  # a neighbor of bf16
    assert not torch.equal(whole, wide.bfloat16())
