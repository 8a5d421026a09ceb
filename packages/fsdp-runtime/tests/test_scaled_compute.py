"""Matrix products on gathered codes: their numbers, and units that compute so against one process that does."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from quantized_steps import (
    Plain,
    accumulate,
    assert_equal_bits,
    checkpointed,
    descend,
    quantized,
    taken_by_a_gpu,
)
from runtime_helpers import loss_of, seeded, shard, tokens
from torch import nn

from fsdp_runtime import MixedPrecisionPolicy, QuantizationPolicy, fully_shard
from fsdp_runtime._params.kinds import scaled as scaled
from fsdp_runtime._schedule.model import member_of
from fsdp_runtime.memory import gathered_memory, unit_memory
from fsdp_runtime.quantization import BlockFP8, check_products
from ragged_shard import multiplies_blocks
from ragged_shard.testing import on_ranks

FP8 = BlockFP8()
WIDTH = 384  # three bands of tiles
POLICY = QuantizationPolicy(weights=FP8, compute="scaled")
EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}


def coded(values, fmt=FP8, dtype=torch.float32):
    """A whole matrix as a weight of codes."""
    codes, scales, run = quantized(fmt, values)
    return scaled.ScaledWeight(codes, scales, fmt, run, values.shape, dtype)


def rows_read_back(rows, kind):
    """What codes say of rows, fp64; and the largest error that the format allows each element."""
    padded = F.pad(rows.double(), (0, -rows.shape[-1] % 128)).unflatten(-1, (-1, 128))
    amax = padded.abs().amax(-1, keepdim=True)
    up = torch.where(amax > 0, 448.0 / amax, 1.0)
    up = torch.exp2(torch.floor(torch.log2(up))) if kind == "pow2" else up.float().double()
    codes = (padded * up).float().to(torch.float8_e4m3fn).double()
    allowed = torch.maximum(padded.abs() / 16, 2.0**-10 / up)
    found = [one.flatten(-2)[..., : rows.shape[-1]] for one in (codes / up, allowed.expand_as(codes))]
    return found[0], found[1]


@pytest.mark.parametrize(
    ("shape", "kind", "dtype"),
    [
        ((256, 384), "pow2", torch.bfloat16),
        ((256, 384), "fp32", torch.float32),
        ((384, 128), "pow2", torch.float32),
        ((384, 128), "fp32", torch.bfloat16),
    ],
)
def test_products_are_those_of_codes_and_within_the_formats_bound_of_values(shape, kind, dtype):
    torch.manual_seed(0)
    weight: Any = nn.Parameter(coded(torch.randn(shape), BlockFP8(scale=kind), dtype))
    exact = weight.around(weight.codes, weight.scales, torch.float32).dequantize().double()
    bias = nn.Parameter(torch.randn(shape[0], dtype=dtype))
    x = torch.randn(3, 7, shape[1]).mul_(torch.randn(3, 7, 1).exp()).to(dtype).requires_grad_()
    dy = torch.randn(3, 7, shape[0]).to(dtype)
    y = F.linear(x, weight, bias)
    y.backward(dy)
    dx, dw = x.grad, weight.grad
    of_x, x_allowed = rows_read_back(x.detach(), kind)
    of_dy, dy_allowed = rows_read_back(dy, kind)
    product = F.linear(x, weight).detach()
    assert y.equal(product + bias)
    for found, read, allowed, values, matrix in (
        (product, of_x, x_allowed, x.detach(), exact.t()),
        (dx, of_dy, dy_allowed, dy, exact),
    ):
        assert found.dtype == dtype
        expected, terms = read @ matrix, read.abs() @ matrix.abs()
        slack = EPS[dtype] * expected.abs() + 2.0**-18 * terms  # of the result, and of sums in fp32
        assert ((found.double() - expected).abs() <= slack).all()
        assert ((found.double() - values.double() @ matrix).abs() <= allowed @ matrix.abs() + slack).all()
    plain = (dy.flatten(0, 1).t() @ x.detach().flatten(0, 1)).to(dtype)
    assert dw.equal(plain)  # of values: the weight's codes pass it straight through
    assert bias.grad.equal(dy.flatten(0, 1).sum(0))


def test_a_bad_number_makes_its_row_nan_alone():
    values = torch.randn(128, 256)
    weight: Any = nn.Parameter(coded(values))
    x = torch.randn(4, 256)
    x[1, 200] = torch.inf
    y = F.linear(x, weight)
    assert y[1].isnan().all()
    assert y[[0, 2, 3]].isfinite().all()
    read = weight.dequantize()
    empty = torch.zeros(0, 256, requires_grad=True)
    assert F.linear(empty, weight).shape == (0, 128)
    F.linear(empty, weight).sum().backward()
    assert empty.grad.shape == (0, 256)
    assert not weight.grad.any()
    assert (weight @ torch.ones(256)).equal(read @ torch.ones(256))
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(torch.ones(2, 256), weight, torch.ones(128))
    assert y.dtype == torch.bfloat16
    weight.grad = None
    y.float().sum().backward()
    assert weight.grad.dtype == torch.float32
    with pytest.raises(RuntimeError, match="dtype"):
        F.linear(torch.ones(2, 256).bfloat16(), weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scaled_mm_gets_torchs_layout_and_gives_the_numbers_of_the_cpu(monkeypatch, dtype):
    scaled_mm: Any = F.scaled_mm

    def multiplied(a, b, scale_a, recipe_a, scale_b, recipe_b, output_dtype):
        assert (recipe_a, recipe_b) == (F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128)
        given = (a, b, scale_a, scale_b)
        shape = taken_by_a_gpu(scaled_mm, given, recipe_a, recipe_b, output_dtype=output_dtype)
        assert shape == (a.shape[0], b.shape[1])
        wide_a = scale_a.repeat_interleave(128, 1)[:, : a.shape[1]]
        wide_b = scale_b.repeat_interleave(128, 0)[: b.shape[0]].repeat_interleave(128, 1)[:, : b.shape[1]]
        return ((a.float() * wide_a) @ (b.float() * wide_b)).to(output_dtype)

    for shape in ((256, 640), (384, 128)):
        torch.manual_seed(0)
        weight = coded(torch.randn(shape), dtype=dtype)
        for transposed, width in ((False, shape[1]), (True, shape[0])):
            rows = torch.randn(5, width, dtype=dtype)
            here = weight.product_with(rows, transposed)
            with monkeypatch.context() as patch:
                patch.setattr(scaled, "multiplies_blocks", lambda device: True)
                patch.setattr(F, "scaled_mm", multiplied)
                there = weight.product_with(rows, transposed)
            assert there.dtype == dtype
            assert torch.allclose(here, there, rtol=EPS[dtype], atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or not multiplies_blocks(torch.device("cuda", 0)),
    reason="needs a Hopper GPU (sm_90) and torch built for CUDA 12.9 or later",
)
@pytest.mark.parametrize("shape", [(256, 640), (384, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scaled_mm_gives_the_cpus_product_on_a_gpu(shape, dtype):
    torch.manual_seed(0)
    here = coded(torch.randn(shape), dtype=dtype)
    there = here.to("cuda")
    for rows in (1, 30, 256):
        for transposed in (False, True):
            x = torch.randn(rows, shape[0 if transposed else 1], dtype=dtype)
            expected = here.product_with(x, transposed)
            found = there.product_with(x.cuda(), transposed).cpu()
            assert torch.allclose(found, expected, rtol=2 * EPS[torch.bfloat16], atol=1e-2)


# -- units -------------------------------------------------------------------------------------------------------------


def body():
    return seeded(width=WIDTH, blocks=2)


def train(cut="whole", make=body, microbatches=1, **options):
    plain = Plain(body, coded)
    policy = QuantizationPolicy(weights=FP8, gradients="bf16", cut=cut, compute="scaled")
    model = shard(make(), quantization_policy=policy, **options)
    for step in range(2):
        plain.step(step, microbatches)
        accumulate(model, step, microbatches)
        descend(model.parameters())  # a write outside of training: the codes of the next gather follow
    assert_equal_bits(model, plain.masters)
    with torch.no_grad():
        plain.masters["blocks.1.weight"].mul_(2)
        model.blocks[1].weight.mul_(2)
    plain.bring_weights()
    with torch.no_grad():
        assert loss_of(model, tokens(9)).equal(loss_of(plain.model, tokens(9)))


@on_ranks(4)  # there are three bands of tiles
def test_units_compute_and_train_as_one_process_with_whole_codes():
    train(reshard_after_forward=False)
    train(make=lambda: checkpointed(body()), microbatches=2)
    train(cut="shared")
    train(reshard_after_forward=2)


@on_ranks(3)
def test_a_gathered_unit_holds_codes_and_scales_and_no_values():
    ranks, precision = dist.get_world_size(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = shard(body(), quantization_policy=POLICY, mp_policy=precision)
    block = unit_memory(model.blocks[0])
    weight, bias = member_of(model.blocks[0]).unit.groups
    codes = ranks * sum(segment.shard_size for segment in weight.plan.layout.segments)
    scales, biases = 4 * 9, 2 * ranks * sum(segment.shard_size for segment in bias.plan.layout.segments)
    assert sum(block.gathered) == codes + scales + biases
    assert sum(block.decoding) == 4 * ranks * weight.planes.num_scales
    assert codes < 1.5 * WIDTH * WIDTH
    before = gathered_memory(model).lent_bytes
    model.blocks[0].unshard()
    assert gathered_memory(model).lent_bytes - before == sum(block.gathered)  # and nothing else
    one = model.blocks[0].weight
    assert isinstance(one, scaled.ScaledWeight)
    assert one.codes.untyped_storage().nbytes() == codes
    assert one.dtype == torch.bfloat16
    model.blocks[0].reshard()
    assert one.codes.untyped_storage().nbytes() == 0
    loss_of(model, tokens()).backward()
    assert model.blocks[0].weight.grad.dtype == torch.float32


@on_ranks(2)
def test_weights_at_rest_are_multiplied_as_codes_too():
    torch.manual_seed(0)
    base = nn.Linear(256, 256, bias=False).requires_grad_(False)
    model = nn.Sequential(base, nn.Linear(256, 128))
    expected = model[1](F.linear(torch.ones(2, 256), coded(base.weight)))
    fully_shard(model, quantization_policy=QuantizationPolicy(at_rest=FP8, compute="scaled"))
    y = model(torch.ones(2, 256))
    assert y.equal(expected)
    y.sum().backward()
    assert model[0].weight.grad is None
    assert model[1].weight.grad is not None


@on_ranks(2)
def test_a_compiled_block_computes_the_same():
    torch.manual_seed(0)
    losses = []
    for backend in (None, "aot_eager"):
        model = shard(body(), quantization_policy=POLICY)
        if backend:
            for block in model.blocks:
                block.compile(backend=backend)
        for step in range(2):
            loss = loss_of(model, tokens(step))
            loss.backward()
            losses.append(loss.detach())
            descend(model.parameters())
    assert losses[0].equal(losses[2])
    assert losses[1].equal(losses[3])


@on_ranks(1)
def test_a_parameter_without_such_products_is_named():
    with pytest.raises(NotImplementedError, match=r"needs a Hopper GPU \(sm_90\).*found meta"):
        check_products("w", (16, 16), [], torch.device("meta"), FP8)
    everything = QuantizationPolicy(
        weights=FP8, compute="scaled", select=lambda name, param, module: param.ndim > 1
    )
    for module, message in (
        (
            nn.Embedding(128, 128),
            "parameter weight was selected .* is weight of a Embedding; expected weight of a Linear",
        ),
        (nn.Linear(128, 144), r"shape \(144, 128\), expected multiples of 128"),
    ):
        with pytest.raises(ValueError, match=message):
            fully_shard(module, quantization_policy=everything)
        assert type(module.weight.data) is torch.Tensor
