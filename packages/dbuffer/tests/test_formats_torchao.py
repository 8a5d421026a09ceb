"""MXFP8 and NVFP4 beside torchao's: the same codes and scales, and torchao's tensors around our memory."""

import pytest
import torch
from dbuffer_helpers import quantized_tensor

from dbuffer import BlockFP8, BlockNVFP4

pytest.importorskip("torchao", reason="torchao is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's own, on importing prototypes


def weights(dtype):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(96, 256, generator=generator)
    values *= torch.exp(4 * torch.randn(96, 256, generator=generator))
    values[3, :64], values[5, :16], values[7, 0] = 0.0, -0.0, -1e-30
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mxfp8_has_the_codes_and_scales_of_torchaos_rceil_mode(dtype):
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    values = weights(dtype)
    scales, codes = to_mx(values, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    ours = quantized_tensor(BlockFP8((1, 32), "e8m0"), values)
    assert ours.codes.equal(codes.view(torch.uint8).view(-1))
    assert ours.scales.equal(scales.view(torch.uint8).view(-1))
    columns = quantized_tensor(BlockFP8((32, 1), "e8m0"), values)
    scales, codes = to_mx(values.t().contiguous(), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    assert columns.codes.view(96, 256).equal(codes.view(torch.uint8).t())
    assert columns.scales.view(3, 256).equal(scales.view(torch.uint8).t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nvfp4_has_the_codes_and_scales_of_torchao(dtype):
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    values = weights(dtype)
    scales, codes = nvfp4_quantize(values, 16, per_tensor_amax_to_scale(values.abs().amax()))
    rows = quantized_tensor(BlockNVFP4(), values).codes.view(96, 128 + 16)
    assert rows[:, :128].equal(codes.view(torch.uint8))
    assert rows[:, 128:].equal(scales.view(torch.uint8).view(96, 16))


def test_torchaos_tensors_around_our_codes_have_our_values():
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    from torchao.quantization.quantize_.common import KernelPreference

    values = weights(torch.bfloat16)
    ours = quantized_tensor(BlockFP8((1, 32), "e8m0"), values)
    theirs = MXTensor(
        ours.codes.view(torch.float8_e4m3fn).view(96, 256), ours.scales.view(torch.float8_e8m0fnu).view(96, 8),
        torch.float8_e4m3fn, 32, torch.bfloat16, KernelPreference.EMULATED, None, False,
    )  # fmt: skip
    assert theirs.dequantize(torch.bfloat16).equal(ours.dequantize())
    ours = quantized_tensor(BlockNVFP4(), values)
    rows = ours.codes.view(96, 128 + 16)
    theirs = NVFP4Tensor(
        rows[:, :128].contiguous(), rows[:, 128:].contiguous().view(torch.float8_e4m3fn), 16, torch.bfloat16,
        per_tensor_scale=ours.scales[0] / 2688,
    )  # fmt: skip
    assert theirs.dequantize(torch.bfloat16).equal(ours.dequantize())


def test_values_of_torchaos_tensors_are_kept_exactly_as_mxfp8():
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode

    theirs = MXTensor.to_mx(weights(torch.bfloat16), torch.float8_e4m3fn, 32, ScaleCalculationMode.FLOOR)
    values = theirs.dequantize(torch.bfloat16)
    assert quantized_tensor(BlockFP8((1, 32), "e8m0"), values).dequantize().equal(values)
