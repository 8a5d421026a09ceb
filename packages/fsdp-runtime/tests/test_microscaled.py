"""Products on MXFP8 codes, and units that gather those of rows for forward and those of columns for backward."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from quantized_steps import Plain, accumulate, checkpointed, descend, quantized, taken_by_a_gpu
from runtime_helpers import loss_of, seeded, shard, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

from dbuffer import BlockQuantizedTensor, CodePlanes
from fsdp_runtime import QuantizationPolicy, fully_shard
from fsdp_runtime._params.kinds import microscaled
from fsdp_runtime._schedule.model import member_of
from fsdp_runtime.memory import unit_memory
from fsdp_runtime.quantization import MX_COLUMNS, MX_ROWS, check_products
from ragged_shard.testing import on_ranks, record_collectives

WIDTH = 96  # three bands of tiles
POLICY = QuantizationPolicy(weights=MX_ROWS, compute="scaled")


def coded(values, fmt):
    """A whole matrix as codes."""
    codes, scales, run = quantized(fmt, values)
    return BlockQuantizedTensor(codes, scales, fmt, run, values.shape, torch.float32)


def read_back(values, fmt=MX_ROWS):
    return coded(values.reshape(-1, values.shape[-1]), fmt).dequantize().view(values.shape)


def weight_of(values, **phase):
    phase = {"backward": True, **phase}
    return microscaled.MicroscaledWeight.of(
        coded(values, MX_ROWS), coded(values, MX_COLUMNS), microscaled.Phase(**phase)
    )


def test_forward_multiplies_rows_and_backward_columns():
    # Spread widely, or rows and columns have the same values.
    values = torch.randn(64, 96) * torch.exp(6 * torch.randn(64, 96))
    weight: Any = nn.Parameter(weight_of(values))
    x, dy = torch.randn(3, 7, 96, requires_grad=True), torch.randn(3, 7, 64)
    y = F.linear(x, weight)
    y.backward(dy)
    torch.testing.assert_close(y, read_back(x.detach()) @ read_back(values).t(), rtol=1e-5, atol=1e-2)
    torch.testing.assert_close(x.grad, read_back(dy) @ read_back(values, MX_COLUMNS), rtol=1e-5, atol=1e-2)
    assert weight.grad.equal(dy.flatten(0, 1).t() @ x.detach().flatten(0, 1))
    assert (read_back(values) - read_back(values, MX_COLUMNS)).abs().max() > 1


def test_codes_that_are_not_gathered_are_not_multiplied_with():
    x = torch.randn(2, 64, requires_grad=True)
    y = F.linear(x, weight_of(torch.randn(32, 64), backward=False))
    with pytest.raises(
        RuntimeError, match=r"\(32, 64\) is multiplied with in backward.*set_unshard_in_backward"
    ):
        y.sum().backward()
    weight = weight_of(torch.randn(32, 64), forward=False)
    with pytest.raises(RuntimeError, match=r"\(32, 64\) is multiplied with in backward.*use_reentrant=False"):
        F.linear(x, weight)
    with pytest.raises(RuntimeError, match=r"\(32, 64\) is read in backward"):
        weight + 1
    for copy in (weight.clone, weight.bfloat16):
        with pytest.raises(RuntimeError, match=r"\(32, 64\) is copied in backward"):
            copy()


def test_scales_lie_as_cublas_documents():
    scales = torch.randint(256, (200, 6), dtype=torch.uint8)
    flat = microscaled.swizzled(scales).view(torch.uint8)
    assert flat.numel() == 256 * 8
    for row, block in itertools.product(range(256), range(8)):
        at = (row // 128 * 2 + block // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
        assert flat[at] == (scales[row, block] if row < 200 and block < 6 else 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scaled_mm_gets_torchs_layout_and_gives_the_numbers_of_the_cpu(monkeypatch, dtype):
    scaled_mm: Any = F.scaled_mm

    def unswizzled(flat, rows, blocks):
        padded = -(-rows // 128) * 128, -(-blocks // 4) * 4
        places = torch.arange(padded[0] * padded[1]).view(padded).to(torch.int32)
        order = torch.cat(
            [places.view(torch.uint8).view(*padded, 4)[..., i] for i in range(4)]
        )  # byte by byte
        bytes_ = [microscaled.swizzled(part.contiguous()).view(torch.uint8) for part in order.chunk(4)]
        index = sum(part.long() << 8 * i for i, part in enumerate(bytes_))
        out = torch.empty(padded[0] * padded[1], dtype=torch.uint8)
        out[index] = flat.view(torch.uint8)
        return out.view(padded)[:rows, :blocks].view(torch.float8_e8m0fnu).float()

    def multiplied(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, output_dtype):
        assert recipe_a == recipe_b == F.ScalingType.BlockWise1x32
        assert swizzle_a == swizzle_b == F.SwizzleType.SWIZZLE_32_4_4
        recipes = (recipe_a, recipe_b, swizzle_a, swizzle_b)
        shape = taken_by_a_gpu(scaled_mm, (a, b, scale_a, scale_b), *recipes, output_dtype=output_dtype)
        assert shape == (a.shape[0], b.shape[1])
        blocks = a.shape[1] // 32
        wide_a = unswizzled(scale_a, a.shape[0], blocks).repeat_interleave(32, 1)
        wide_b = unswizzled(scale_b, b.shape[1], blocks).repeat_interleave(32, 1)
        return ((a.float() * wide_a) @ (b.float().t() * wide_b).t()).to(output_dtype)

    for shape in ((160, 96), (64, 320)):
        weight = weight_of(torch.randn(shape))
        for transposed, width in ((False, shape[1]), (True, shape[0])):
            rows = torch.randn(5, width, dtype=dtype)
            here = weight.product_with(rows, transposed)
            with monkeypatch.context() as patch:
                patch.setattr(microscaled, "multiplies_microscaled", lambda device: True)
                patch.setattr(F, "scaled_mm", multiplied)
                there = weight.product_with(rows, transposed)
            assert there.dtype == dtype
            torch.testing.assert_close(here, there, rtol=2.0**-8, atol=1e-3)


# -- units -------------------------------------------------------------------------------------------------------------


def body():
    return seeded(width=WIDTH, blocks=2)


class Around(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def sharded(kind, **options):
    """A body whose blocks are units, with activations checkpointed in one of these ways."""
    model = checkpointed(body()) if kind == "inside" else body()
    policy = {"quantization_policy": POLICY, **options}
    for index in range(len(model.blocks)):
        fully_shard(model.blocks[index], **policy)
        if kind.startswith("around"):
            model.blocks[index] = Around(model.blocks[index], kind == "around, reentrant")
    return fully_shard(model, **policy)


def train(kind="plain", microbatches=1, **options):
    model, plain = sharded(kind, **options), Plain(body, weight_of)
    for step in range(2):
        plain.step(step, microbatches, rounded=False)
        accumulate(model, step, microbatches)
        gradients = {name.replace(".inner", ""): p.grad.full_tensor() for name, p in model.named_parameters()}
        torch.testing.assert_close(gradients, plain.gradients, rtol=0, atol=1e-5)
        descend(model.parameters())
    plain.bring_weights()
    with torch.no_grad():
        expected = loss_of(plain.model, tokens(9))
        torch.testing.assert_close(loss_of(model, tokens(9)), expected, rtol=0, atol=1e-5)


@on_ranks(4)  # there are three bands of tiles
def test_units_train_as_one_process_that_multiplies_rows_and_columns():
    train(reshard_after_forward=False, microbatches=2)
    train(quantization_policy=QuantizationPolicy(weights=MX_ROWS, compute="scaled", cut="shared"))


@on_ranks(3)
def test_a_units_forward_multiplies_rows_and_its_backward_columns():
    torch.manual_seed(0)
    layer: Any = nn.Linear(64, 96, bias=False)
    with torch.no_grad():
        values = layer.weight.mul_(torch.exp(6 * torch.randn(96, 64))).clone()
    fully_shard(layer, quantization_policy=POLICY)
    (group,) = member_of(layer).unit.groups
    planes = [CodePlanes(group.plan.layout, fmt).row_bytes for fmt in (MX_ROWS, MX_COLUMNS)]
    assert unit_memory(layer).codes == sum(planes)
    for _ in range(2):
        x, dy = torch.randn(5, 64, requires_grad=True), torch.randn(5, 96)
        y = layer(x)
        y.backward(dy)
        torch.testing.assert_close(y, read_back(x.detach()) @ read_back(values).t(), rtol=1e-5, atol=1e-2)
        torch.testing.assert_close(
            x.grad, read_back(dy) @ read_back(values, MX_COLUMNS), rtol=1e-5, atol=1e-2
        )
        assert (x.grad - read_back(dy) @ read_back(values)).abs().max() > 1
    layer.unshard()
    assert (layer.weight + 0).equal(read_back(values))
    layer.reshard()


@on_ranks(3)
def test_recomputed_forwards_multiply_rows_too():
    for kind in ("inside", "around", "around, reentrant"):
        train(kind)


@on_ranks(3)
def test_a_gather_moves_the_codes_of_its_phase_and_both_where_backward_recomputes():
    for kind in ("plain", "inside"):
        model = sharded(kind)
        loss_of(model, tokens()).backward()  # its order is known from now on
        weight, bias = member_of(model.blocks[0]).unit.groups
        rows, columns = (CodePlanes(weight.plan.layout, fmt).row_bytes for fmt in (MX_ROWS, MX_COLUMNS))
        assert rows < 1.07 * WIDTH * WIDTH / 3
        biases = 4 * sum(segment.shard_size for segment in bias.plan.layout.segments)
        with record_collectives() as forward:
            loss = loss_of(model, tokens())
        with record_collectives() as backward:
            loss.backward()
        in_backward = columns + (rows if kind == "inside" else 0)
        for record, nbytes in ((forward, rows), (backward, in_backward)):
            sent = [event.bytes_sent for event in record.events if event.kind == "all_gather"]
            assert sent.count((dist.get_world_size() - 1) * (nbytes + biases)) == 2, (kind, sent)


class Reentrant(nn.Linear):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


@on_ranks(4)
def test_what_cannot_be_multiplied_by_phase_is_refused_by_name():
    inner: Any = fully_shard(Reentrant(64, 64), quantization_policy=POLICY)
    model: Any = fully_shard(nn.Sequential(nn.Linear(64, 64), inner))
    loss = model(torch.randn(2, 64)).sum()
    with pytest.raises(RuntimeError, match="checkpoint activations with use_reentrant=False"):
        loss.backward()
    with pytest.raises(NotImplementedError, match=r"needs a Blackwell GPU \(sm_100\).*found meta"):
        check_products("w", (32, 32), [], torch.device("meta"), MX_ROWS)
    with pytest.raises(ValueError, match=r"weight was selected.*shape \(48, 64\), expected multiples of 32"):
        fully_shard(nn.Linear(64, 48), quantization_policy=POLICY)
    with pytest.raises(ValueError, match=r"weight was selected for MXFP8.*use reshard_after_forward=True"):
        shard(body(), quantization_policy=POLICY, reshard_after_forward=2)
