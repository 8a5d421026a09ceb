"""Codes of 8 bits and the grid of their scales."""

import math

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute

from block_optim import AdamW8bit
from block_optim.adam.q8 import codec
from block_optim.adam.q8.codec import FIRST, FIRST_TOP, SECOND, SECOND_TOP
from block_optim.adam.q8.ops import BUFFERS
from block_optim.core.tiles import Stretch, TileScratch
from layout_planner import Elements, Tile
from ragged_shard.testing import on_ranks, rank_mesh

TOPS = {"first": FIRST_TOP, "second": SECOND_TOP}
HALVES = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)


def buffers(numel):
    stretch = Stretch(0, 1, numel, (1, numel), 0)
    return TileScratch(torch.device("cpu"), numel, BUFFERS).buffers(stretch)[:BUFFERS]


def decode(which, codes):
    made = buffers(codes.numel())
    if which == "first":
        codec.decode_first(codes.view(1, -1), made[0], made[1])
    else:
        codec.decode_second(codes.view(1, -1), made[0])
    return made[0].values.clone()


def encode(which, numbers):
    made = buffers(numbers.numel())
    made[0].values.copy_(numbers)
    codes = torch.zeros(1, numbers.numel(), dtype=torch.uint8)
    if which == "first":
        codec.encode_first(made[0], codes, made[1])
    else:
        codec.encode_second(made[0], codes)
    return codes.view(-1)


def every_code(which):
    return decode(which, torch.arange(256, dtype=torch.uint8))


@pytest.mark.parametrize("which", ["first", "second"])
def test_every_fp16_number_gets_the_nearest_code_and_ties_the_larger(which):
    numbers = HALVES.float()
    top = TOPS[which]
    numbers = numbers[numbers.isfinite() & (numbers.abs() <= top)]
    if which == "second":
        numbers = numbers[~numbers.signbit()]
    values = every_code(which).double()
    found = values[encode(which, numbers).long()]
    wanted = (numbers.double()[:, None] - values[None, :]).abs().min(1).values
    assert torch.equal((found - numbers.double()).abs(), wanted)
    middles = (values.unique()[1:] + values.unique()[:-1]) / 2
    exact = middles[middles.float().double() == middles]
    got = values[encode(which, exact.float()).long()]
    assert len(exact) > 50
    assert (got.abs() > exact.abs()).all()


@pytest.mark.parametrize("which", ["first", "second"])
def test_codes_stand_for_themselves(which):
    codes = torch.arange(256, dtype=torch.uint8)
    values = every_code(which)
    assert torch.equal(decode(which, encode(which, values)), values)
    assert len(values.unique()) == 255 if which == "first" else 256
    assert torch.equal(codes, encode(which, values))


def test_the_default_codes_have_the_documented_range_and_error():
    first, second = every_code("first"), every_code("second")
    assert first.abs().max() == 1 - FIRST.value(0) == FIRST_TOP
    assert second.max() == 1 - SECOND.value(-1) == SECOND_TOP
    assert 0 < second.min() < 1.3e-4
    roots = torch.logspace(math.log10(0.01), 0, 5000) * SECOND_TOP
    error = (decode("second", encode("second", roots)) / roots - 1).abs()
    assert error.max() < 0.0225
    moments = torch.linspace(-1, 1, 5001) * FIRST_TOP
    absolute = (decode("first", encode("first", moments)) - moments).abs()
    assert (absolute <= 0.0011 + moments.abs() / 64).all()


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
    for factor in (
        1.0,
        -0.9,
        0.01,
    ):  # the second all but cancels the first moment: what is left elsewhere would show
        small.grad = first * factor
        big.grad = torch.zeros(full)
        big.grad[: shape[0], : shape[1]] = small.grad
        optimizer.step()
    assert torch.equal(small, big[: shape[0], : shape[1]])


@on_ranks(3)
def test_a_layout_that_cuts_a_block_is_refused_on_every_rank_with_the_way_out():
    mesh = rank_mesh(3)
    rows = torch.nn.Parameter(torch_distribute(torch.ones(100, 64), mesh, [Shard(0)]))
    with pytest.raises(
        ValueError, match=r"w: what rank 1 holds begins at element 2176, inside a block of tile:32x32"
    ):
        AdamW8bit([("w", rows)], block=Tile(32, 32))
    with pytest.raises(ValueError, match=r"block_policy=AdamW8bit\.block_policy"):
        AdamW8bit([("w", rows)], block=Elements(256))
    AdamW8bit([("w", rows)], block=Tile(34, 32))
    columns = torch.nn.Parameter(torch_distribute(torch.ones(100, 64), mesh, [Shard(1)]))
    with pytest.raises(
        ValueError, match=r"w: .* its axes cut through blocks of elements:256; choose a block that fits"
    ):
        AdamW8bit([("w", columns)], block=Elements(256))
    AdamW8bit([{"params": [("w", columns)], "quantize": False}], block=Elements(256))
