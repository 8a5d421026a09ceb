"""NVFP4 compared with torchao's: the same codes and scales, and torchao's tensors around our memory."""

import pytest
import torch
from dbuffer_helpers import quantized_tensor

from dbuffer import BlockNVFP4

pytest.importorskip("torchao", reason="torchao is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's own, on importing prototypes


def weights(dtype):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(96, 256, generator=generator)
    values *= torch.exp(4 * torch.randn(96, 256, generator=generator))
    values[3, :64], values[5, :16], values[7, 0] = 0.0, -0.0, -1e-30
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nvfp4_has_the_codes_and_scales_of_torchao(dtype):
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    values = weights(dtype)
    scales, codes = nvfp4_quantize(values, 16, per_tensor_amax_to_scale(values.abs().amax()))
    rows = quantized_tensor(BlockNVFP4(), values).codes.view(96, 128 + 16)
    assert rows[:, :128].equal(codes.view(torch.uint8))
    assert rows[:, 128:].equal(scales.view(torch.uint8).view(96, 16))


def test_torchaos_tensors_around_our_codes_have_our_values():
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    values = weights(torch.bfloat16)
    ours = quantized_tensor(BlockNVFP4(), values)
    rows = ours.codes.view(96, 128 + 16)
    theirs = NVFP4Tensor(
        rows[:, :128].contiguous(), rows[:, 128:].contiguous().view(torch.float8_e4m3fn), 16, torch.bfloat16,
        per_tensor_scale=ours.scales[0] / 2688,
    )  # fmt: skip
    assert theirs.dequantize(torch.bfloat16).equal(ours.dequantize())
