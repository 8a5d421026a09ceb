# mypy: disable-error-code="import-untyped, import-not-found"
"""Run by test_kernels.py in a process of its own: Triton's interpreter must be chosen before Triton is imported.

Compares each format's codes, scales and values by the kernels with those by torch ops, to the bit.
"""

import torch

from dbuffer.encodings import BlockFP8, BlockInt8, BlockNF4, Noise, RowRun, RunList, launch

EXTREMES = (
    0x7FFFFFFF, 0x7FC00000, 0x7F810000, 0x7F800000, 0x7F7FFFFF, 0x00800000, 0x007FFFFF, 0x00010000, 0x1, 0, 0x7F7F8000,
)  # fmt: skip  # fp32's bits: NaNs, infinity, the largest and smallest numbers, denormal ones, zero


def values_of(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(shape, generator=generator)
    return (found * torch.exp(4 * torch.randn(shape, generator=generator))).clamp(-6e4, 6e4).to(dtype)


def extreme_values():
    bits = torch.tensor([b | s for b in EXTREMES for s in (0, -(1 << 31))]).to(torch.int32)
    return bits.view(torch.float32)


def run(kernels, fmt, values, rows, out_dtype, shift):
    """Codes, scales, values and sums of a run of rows, by kernels or by torch ops."""
    vars(launch)["has_kernels"] = lambda fmt, device: kernels
    grid, (start, stop) = fmt.grid(values.shape), rows
    columns, first = grid.columns, rows[0] * grid.columns
    runs = RunList([RowRun(grid, start, stop, first + shift, shift, shift, (1 << 32) - 100 + first)])
    flat = torch.cat([torch.zeros(shift, dtype=values.dtype), values.reshape(-1)])
    codes = torch.full((shift + (stop - start) * columns,), 7, dtype=torch.uint8)
    scales = torch.full((shift + runs[0].num_scales,), 9.0)
    noise = Noise(3, 5, 1) if fmt.needs_noise else None
    fmt.quantize(runs, flat, codes, scales, noise=noise)
    out = torch.zeros(shift + values.numel(), dtype=out_dtype)
    fmt.dequantize(runs, codes, scales, out)
    total = torch.zeros(shift + values.numel())
    fmt.sum(runs, torch.stack([codes, codes.flip(0), codes]), torch.stack([scales, scales, scales]), total)
    return codes, scales, out, total


def same(fmt, values, rows, out_dtype=torch.float32, shift=0):
    """Raise unless both ways agree; a NaN may have any bits in values, not in scales."""
    pairs = [run(kernels, fmt, values, rows, out_dtype, shift) for kernels in (False, True)]
    for name, a, b in zip(("codes", "scales", "values", "sums"), *pairs, strict=True):
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
        equal = a.view(whole) == b.view(whole)
        if name in ("values", "sums"):
            equal |= a.isnan() & b.isnan()
        assert equal.all(), f"{fmt} {tuple(values.shape)} {rows} {name}: {int((~equal).sum())} differ"
    print("same bits:", fmt, tuple(values.shape), rows, values.dtype, out_dtype)


def all_codes():
    """Every code of either kind, read back."""
    for fmt in (BlockFP8((1, 256)), BlockInt8(256)):
        found = []
        for kernels in (False, True):
            vars(launch)["has_kernels"] = lambda fmt, device, kernels=kernels: kernels
            out = torch.empty(256)
            run_ = [RowRun(fmt.grid((1, 256)), 0, 1)]
            fmt.dequantize(run_, torch.arange(256, dtype=torch.uint8), torch.ones(1), out)
            found.append(out)
        assert torch.allclose(found[0], found[1], rtol=0, atol=0, equal_nan=True)
    print("all codes")


def four_bits(fmt, shape, rows, dtype, shift=0):
    """Values of four-bit codes, all 256 bytes among them, and of a block that is NaN."""
    grid, (start, stop) = fmt.grid(shape), rows
    runs = RunList(
        [RowRun(grid, start, stop, shift, shift, shift), RowRun(fmt.grid((3, 130)), 0, 3, 40_000, 40_000)]
    )
    codes = torch.randint(256, (50_000,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    scales = torch.randn(1000, generator=torch.Generator().manual_seed(1)).exp()
    scales[shift] = torch.nan
    found = []
    for kernels in (False, True):
        vars(launch)["has_kernels"] = lambda fmt, device, kernels=kernels: kernels
        found.append(torch.full((50_000,), -1.0, dtype=dtype))
        fmt.dequantize(runs, codes, scales, found[-1])
    whole = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    equal = (found[0].view(whole) == found[1].view(whole)) | (found[0].isnan() & found[1].isnan())
    assert equal.all(), f"{fmt} {shape} {rows}: {int((~equal).sum())} differ"
    assert found[0].isnan().any()
    print("same bits:", fmt, shape, rows, dtype)


if __name__ == "__main__":
    for size, columns in ((64, 512), (64, 256), (8, 64), (64, 5120)):  # 5120: three programs a row, one scale
        four_bits(BlockNF4(size), (40, columns) if columns < 5120 else (8, columns), (3, 8), torch.float32)
    four_bits(BlockNF4(64), (40, 320), (0, 40), torch.bfloat16)
    four_bits(BlockNF4(64), (40, 130), (3, 31), torch.float32, shift=3)
    four_bits(BlockNF4(32), (7, 129), (0, 7), torch.float16, shift=1)
    four_bits(BlockNF4(2), (3, 1100), (1, 3), torch.bfloat16, shift=5)
    fp8, small, fp32 = BlockFP8(), BlockFP8((32, 32)), BlockFP8((16, 64), "fp32")
    for fmt in (fp8, small, fp32, BlockInt8(), BlockInt8(100), BlockInt8(256, "stochastic")):
        same(fmt, values_of((80, 320), torch.float32), (0, 80))
    for fmt in (small, BlockInt8(64, "stochastic")):
        same(fmt, values_of((2, 40, 70), torch.bfloat16), (0, 80), torch.bfloat16, shift=3)
    same(small, values_of((64, 64), torch.float16), (32, 64), torch.float16, shift=16)
    same(small, values_of((100, 64), torch.float32), (32, 100), torch.bfloat16)
    same(fp8, values_of((40, 128), torch.bfloat16), (0, 40), torch.bfloat16)
    for tile in ((1, 32), (32, 1)):
        same(BlockFP8(tile), values_of((70, 96), torch.bfloat16), (0, 70), torch.bfloat16, shift=16)
        same(BlockFP8(tile), values_of((2, 40, 50), torch.float32), (40, 80), shift=3)
    extremes = extreme_values()[:, None].repeat(1, 16) * torch.ones(16)
    rows = [BlockFP8((1, 16), scale) for scale in ("pow2", "fp32")]
    for each in (*rows, BlockFP8((1, 1)), BlockInt8(16), BlockInt8(16, "stochastic")):
        same(each, extremes, (0, len(extremes)), torch.bfloat16)
    mixed = torch.randn(32, 22 * 16)
    mixed[3, ::16] = extreme_values()
    same(BlockFP8((8, 16)), mixed, (0, 32))
    all_codes()
