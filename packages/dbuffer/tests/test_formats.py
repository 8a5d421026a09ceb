"""Quantized blocks against a reference of their own, at every division into runs, with bad numbers and at the edges."""

import itertools
from typing import Any

import numpy as np
import pytest
import reference_formats as reference
import torch

from dbuffer.encodings import BlockFP8, BlockInt8, BlockNF4, Noise, RowRun

SHAPES = [(140, 150), (128, 64), (1000,), (3, 70, 50), (2, 64, 33), (1, 1), (5, 3, 4, 6), (40, 128), ()]
FORMATS: list[Any] = [
    BlockFP8(),
    BlockFP8(scale="fp32"),
    BlockFP8((32, 32)),
    BlockFP8((32, 32), "fp32"),
    BlockFP8((1, 128)),
    BlockFP8((1, 32)),
    BlockFP8((32, 1)),
    BlockInt8(),
    BlockInt8(64),
]
ALL = [*FORMATS, BlockNF4(), BlockNF4(16)]


def values_of(shape, dtype=torch.float32, seed=0):
    found = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (found * torch.exp(3 * found.roll(1))).clamp(-6e4, 6e4).to(dtype)  # of many magnitudes


def whole(fmt, shape):
    grid = fmt.grid(shape)
    return RowRun(grid, 0, grid.rows)


def quantize(fmt, values, **more):
    run = whole(fmt, values.shape)
    codes = torch.full((run.grid.rows * fmt.code_bytes(run.grid.columns),), 0xA5, dtype=torch.uint8)
    scales = torch.full((run.num_scales,), 9.0)
    fmt.quantize([run], values.reshape(-1), codes, scales, **more)
    return codes, scales


def dequantize(fmt, shape, codes, scales, dtype=torch.float32):
    out = torch.empty(shape, dtype=dtype)
    fmt.dequantize([whole(fmt, shape)], codes, scales, out.view(-1))
    return out


def expected(fmt, values):
    number = values.float().numpy()
    if isinstance(fmt, BlockFP8):
        return reference.quantize(number, fmt.tile, 448, fmt.scale, reference.e4m3_codes)
    return reference.quantize(number, fmt.tile, 127, "fp32", reference.int8_codes)


def bits(values):
    return values.view({4: torch.int32, 2: torch.int16}[values.element_size()])


def assert_as_reference(fmt, values):
    codes, scales = quantize(fmt, values)
    want_codes, want_scales = expected(fmt, values)
    assert np.array_equal(scales.numpy(), want_scales), (fmt, values.shape, values.dtype)
    assert np.array_equal(codes.numpy(), want_codes.reshape(-1)), (fmt, values.shape, values.dtype)
    return codes, scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_codes_and_scales_are_those_of_the_reference(fmt, dtype):
    for shape in SHAPES:
        assert_as_reference(fmt, values_of(shape, dtype))


def test_all_256_codes_are_read_back_exactly_in_every_dtype():
    codes = torch.arange(256, dtype=torch.uint8)
    signs = np.where(np.arange(256) < 128, 1.0, -1.0)
    want = torch.from_numpy(signs * np.tile(reference.E4M3, 2)).view(1, 256)
    fmt = BlockFP8((1, 256))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = dequantize(fmt, (1, 256), codes, torch.ones(1), dtype)
        assert torch.equal(found.double().isnan(), want.isnan())
        assert torch.equal(found.double().nan_to_num(0), want.nan_to_num(0))
        assert found[0, 128].signbit()  # -0.0
    finite = codes[~want.view(-1).isnan()]
    fmt = BlockFP8((1, 254))
    again, _ = quantize(fmt, dequantize(fmt, (1, 254), finite, torch.ones(1)))
    assert again.equal(finite)
    integers = dequantize(BlockInt8(256), (1, 256), codes, torch.ones(1))
    assert integers.view(-1).equal(codes.view(torch.int8).float())


@pytest.mark.parametrize("scale", ["pow2", "fp32"])
def test_the_error_bound_holds_on_a_million_values(scale):
    fmt, values = BlockFP8(scale=scale), values_of((1024, 1024))
    codes, scales = quantize(fmt, values)
    error = (dequantize(fmt, values.shape, codes, scales).double() - values.double()).abs()
    steps = scales.double().view(8, 8).repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert (error <= torch.maximum(values.double().abs() / 16, steps / 1024)).all()
    kept = dequantize(fmt, values.shape, codes, scales, torch.bfloat16).float()
    exact = dequantize(fmt, values.shape, codes, scales)
    assert kept.equal(exact) == (scale == "pow2")  # fp32 scales round a second time


@pytest.mark.parametrize("fmt", ALL, ids=str)
def test_codes_do_not_depend_on_the_division_into_whole_bands(fmt):
    for shape in (*SHAPES, (0, 8), (8, 0), (0,), (2, 0, 5)):
        values = values_of(shape, seed=1)
        more = {"noise": Noise(1, 2, 3)} if fmt.needs_noise else {}
        want_codes, want_scales = quantize(fmt, values, **more)
        grid = fmt.grid(shape)
        cuts = [row for row in range(grid.rows + 1) if grid.is_whole(0, row)]
        cuts = sorted({0, grid.rows, *cuts[1::3]})
        runs = scattered(fmt, grid, cuts)
        codes, scales = torch.zeros_like(want_codes), torch.zeros_like(want_scales)
        fmt.quantize(runs, values.reshape(-1), codes, scales, **more)
        assert codes.equal(want_codes)
        assert scales.equal(want_scales)
        out = torch.zeros(values.numel())
        fmt.dequantize(runs, codes, scales, out)
        assert out.equal(dequantize(fmt, shape, codes, scales).view(-1))


def scattered(fmt, grid, cuts):
    """Runs between cuts, with empty ones between them, in the order of the tensor, all in its own place."""
    runs = []
    for start, stop in itertools.pairwise(cuts):
        for end in (start, stop):
            width = fmt.code_bytes(grid.columns)
            first = start * grid.columns
            runs.append(RowRun(grid, start, end, first, start * width, grid.scales_of(start, end)[0], first))
    return runs


def odd(pattern):
    return torch.tensor([pattern], dtype=torch.int64).to(torch.int32).view(torch.float32)


# NaNs and infinities, by their bits.
BAD = [0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0x7F800001, 0x7F800000, 0xFF800000]


@pytest.mark.parametrize("fmt", [*ALL, BlockInt8(64, "stochastic")], ids=str)
@pytest.mark.parametrize("pattern", BAD, ids=hex)
def test_a_tile_with_a_bad_number_is_read_back_as_nan_and_no_other(fmt, pattern):
    more = {"noise": Noise(0, 0, 0)} if fmt.needs_noise else {}
    good = torch.randn(140, 300)
    values = good.clone()
    values[3, 290:291] = odd(pattern)
    codes, scales = quantize(fmt, values, **more)
    found = dequantize(fmt, values.shape, codes, scales)
    tile = torch.zeros(140, 300, dtype=torch.bool)
    columns = slice(290 // fmt.tile[1] * fmt.tile[1], (290 // fmt.tile[1] + 1) * fmt.tile[1])
    tile[slice(fmt.tile[0]) if fmt.tile[0] > 1 else 3, columns] = True
    assert found.isnan().equal(tile)
    assert found[~tile].equal(dequantize(fmt, values.shape, *quantize(fmt, good, **more))[~tile])
    assert bits(scales[scales.isnan()]).eq(0x7FC00000).all()
    if not isinstance(fmt, BlockNF4):
        assert (codes.view(140, 300)[tile] == 0).all()


def test_zeros_denormals_and_huge_numbers():
    tiny, huge = 2.0**-149, torch.finfo(torch.float32).max
    values = torch.tensor([0.0, -0.0, tiny, -tiny, 2.0**-130, -(2.0**-127), huge, -huge, 1.0, -1.0])
    for fmt in (
        *(BlockFP8((1, 2), s) for s in ("pow2", "fp32")),
        BlockInt8(2),
        BlockFP8((1, 10)),
        BlockInt8(10),
    ):
        codes, scales = assert_as_reference(fmt, values)
        found = dequantize(fmt, values.shape, codes, scales)
        assert found[[*range(6), 8, 9]].isfinite().all()  # fp32's largest may be rounded up to infinity
        assert not found.isnan().any()
    codes, scales = quantize(BlockFP8((1, 2)), values)
    assert (codes[:2].tolist(), float(scales[0])) == ([0, 0x80], 1.0)


def test_nf4_takes_the_nearest_level_and_its_error_is_bounded():
    for columns in (1, 63, 64, 130, 20000):
        fmt, values = BlockNF4(), values_of((7, columns))
        codes, scales = quantize(fmt, values)
        found = dequantize(fmt, values.shape, codes, scales).double()
        blocks = -(-columns // 64)
        rows = codes.view(7, -1)
        group = scales.view(7, -1).repeat_interleave(256, 1)[:, :blocks].double()
        scale = (rows[:, -blocks:].double() / 255).square() * group
        padded = torch.zeros(7, blocks * 64, dtype=torch.float64)
        padded[:, :columns] = values.double()
        largest = padded.view(7, blocks, 64).abs().amax(2)
        excess = group * (2 * (largest / group).sqrt() + 1 / 255) / 255
        assert (scale >= largest * (1 - 1e-6)).all()
        assert (scale <= largest + excess * (1 + 1e-5)).all()
        bound = (0.1520 * scale).repeat_interleave(64, 1)[:, :columns]
        assert ((found - values.double()).abs() <= bound + 1e-6 * group.amax()).all()
        assert rows.shape[1] == fmt.code_bytes(columns)


def test_nf4_takes_at_most_0_56_bytes_an_element():
    fmt = BlockNF4()
    for columns in range(128, 70_000, 13):
        assert (fmt.code_bytes(columns) + 4 * fmt.grid((1, columns)).num_scales) / columns <= 0.56
    assert (fmt.code_bytes(4096) + 4) / 4096 < 0.518


def test_stochastic_rounding_is_unbiased_and_keeps_integers():
    fmt, draws = BlockInt8(256, "stochastic"), 4096
    row = torch.linspace(-127, 127, 256)
    values = row.expand(draws, 256).contiguous()
    state = torch.get_rng_state()
    codes, scales = quantize(fmt, values, noise=Noise(5, 7, 1))
    assert torch.get_rng_state().equal(state)
    assert (scales == scales[0]).all()
    found = codes.view(torch.int8).view(draws, 256).double()
    exact = (values[0] / 127 * 127).double()
    fraction = exact - exact.floor()
    sigma = (fraction * (1 - fraction) / draws).sqrt()
    assert ((found.mean(0) - exact).abs() <= 4.5 * sigma + 2e-5).all()
    assert set(found[:, 0].tolist()) == {-127.0}
    whole_numbers = torch.arange(-127.0, 128).expand(8, 255).contiguous()
    codes, _ = quantize(BlockInt8(255, "stochastic"), whole_numbers, noise=Noise(0, 0, 0))
    assert codes.view(torch.int8).float().equal(whole_numbers.view(-1))


def test_random_bits_belong_to_element_step_rank_and_seed():
    fmt, values = BlockInt8(64, "stochastic"), torch.randn(60, 100)
    want, scales = quantize(fmt, values, noise=Noise(1, 2, 3))
    assert quantize(fmt, values, noise=Noise(1, 2, 3))[0].equal(want)
    for other in (Noise(0, 2, 3), Noise(1, 3, 3), Noise(1, 2, 4), Noise(1 + (1 << 40), 2, 3)):
        assert (quantize(fmt, values, noise=other)[0] != want).float().mean() > 0.2
    grid = fmt.grid(values.shape)
    codes = torch.zeros_like(want)
    fmt.quantize(scattered(fmt, grid, [0, 7, 31, 60]), values.view(-1), codes, scales, noise=Noise(1, 2, 3))
    assert codes.equal(want)


def test_random_bits_go_on_where_the_index_passes_32_bits():
    fmt, values = BlockInt8(64, "stochastic"), torch.randn(2, 64)
    grid, first = fmt.grid((2, 64)), (1 << 32) - 64
    both, one = torch.zeros(128, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    scales, noise = torch.zeros(2), Noise(0, 0, 0)
    fmt.quantize([RowRun(grid, 0, 2, element=first)], values.view(-1), both, scales, noise=noise)
    fmt.quantize([RowRun(grid, 1, 2, element=1 << 32)], values[1], one, scales, noise=noise)
    assert both[64:].equal(one)
    fmt.quantize([RowRun(grid, 1, 2, element=0)], values[1], one, scales, noise=noise)
    assert not both[64:].equal(one)


@pytest.mark.parametrize("fmt", [BlockFP8(), BlockFP8((32, 32), "fp32"), BlockInt8()], ids=str)
def test_sums_are_those_of_fp32_additions_in_the_order_of_ranks(fmt):
    shape = (150, 200)
    contributions = [values_of(shape, seed=rank) for rank in range(3)]
    quantized = [quantize(fmt, values) for values in contributions]
    codes, scales = (torch.stack(found) for found in zip(*quantized, strict=True))
    out = torch.full((150 * 200,), torch.nan)
    fmt.sum([whole(fmt, shape)], codes, scales, out)
    want = dequantize(fmt, shape, *quantized[0])
    for one in quantized[1:]:
        want += dequantize(fmt, shape, *one)
    assert out.equal(want.view(-1))


def test_what_no_run_covers_is_left_alone():
    fmt, grid = BlockFP8((32, 32)), BlockFP8((32, 32)).grid((64, 40))
    run = RowRun(grid, 32, 64, values=5, codes=7, scales=3)
    values = torch.randn(5 + 32 * 40)
    codes, scales = torch.full((1300,), 9, dtype=torch.uint8), torch.full((8,), -1.0)
    fmt.quantize([run], values, codes, scales)
    assert (codes[:7] == 9).all()
    assert (codes[7 + 1280 :] == 9).all()
    assert scales[[0, 1, 2, 5, 6, 7]].eq(-1).all()
    assert scales[3:5].gt(0).all()


@pytest.mark.parametrize("fmt", ALL, ids=str)
def test_the_host_reads_nothing_of_values_and_codes_on_a_device(fmt):
    run = whole(fmt, (64, 256))
    values, scales = (torch.empty(size, device="meta") for size in (64 * 256, run.num_scales))
    codes = torch.empty(64 * fmt.code_bytes(256), dtype=torch.uint8, device="meta")
    fmt.quantize([run], values, codes, scales)
    fmt.dequantize([run], codes, scales, values)
    if not isinstance(fmt, BlockNF4):
        fmt.sum([run], codes[None], scales[None], values)
