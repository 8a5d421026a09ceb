"""torchao's tensor subclasses, as they are: next to the same model on one process."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_runtime import MixedPrecisionPolicy, fully_shard
from ragged_shard.testing import on_ranks, record_collectives, run_ranks

pytest.importorskip("torchao", reason="torchao is not installed")


def float8(model, gathered):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(
        model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=gathered, emulate=True)
    )


def int8_mixed(model, gathered):
    from torchao.prototype.quantized_training import int8_mixed_precision_training
    from torchao.quantization import quantize_

    quantize_(model, int8_mixed_precision_training())
    return model


def bitnet(model, gathered):
    from torchao.prototype.quantized_training import bitnet_training
    from torchao.quantization import quantize_

    quantize_(model, bitnet_training())
    return model


def build(sizes):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])


def precompute(convert, model):
    if convert is float8:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)
    else:
        from torchao.prototype.quantized_training import precompute_bitnet_scale_for_fsdp

        precompute_bitnet_scale_for_fsdp(model)


def train(convert, sizes, ahead, steps=3):
    model, twin = convert(build(sizes), True), convert(build(sizes), False)
    for one in model:
        fully_shard(one)
    fully_shard(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True) for m in (model, twin)]
    for step in range(steps):
        x = torch.randn(16, sizes[0], generator=torch.Generator().manual_seed(step))
        found, wanted = model(x), twin(x)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        found.square().mean().backward()
        wanted.square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if ahead:
            precompute(convert, model)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), torch.as_tensor(q.detach()) + 0, rtol=1e-4, atol=1e-5)
    with record_collectives() as record:
        model(torch.randn(16, sizes[0]))
    return sum(event.kind == "all_reduce" for event in record.events)


@pytest.mark.parametrize("ahead", [False, True])
def test_float8_with_fp8_gathers_trains_on_uneven_and_empty_shards(ahead):
    reduced = run_ranks(3, train, float8, (32, 64, 33, 2, 16), ahead)
    assert reduced == [0 if ahead else 4] * 3  # the largest magnitude of each matrix, or none


def test_int8_mixed_precision_and_bitnet_in_two_bits_train():
    run_ranks(3, train, int8_mixed, (32, 64, 33, 16), False)
    for ahead in (False, True):
        run_ranks(2, train, bitnet, (32, 64, 32), ahead)


@on_ranks(2)
def test_float8_sends_a_byte_an_element_and_computes_in_the_policys_dtype():
    sizes = (32, 64, 32)
    model = float8(build(sizes), True)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    out = model(torch.randn(16, sizes[0]))
    assert out.dtype == torch.bfloat16
    model.reshard()
    with record_collectives() as record:
        model.unshard()
    weights = sum(a * b for a, b in itertools.pairwise(sizes)) // dist.get_world_size()
    biases = 2 * sum(sizes[1:]) // dist.get_world_size()
    gathered = [event.bytes_sent for event in record.events if event.kind == "all_gather"]
    assert gathered == [(dist.get_world_size() - 1) * (weights + biases)]


@on_ranks(2)
def test_weights_quantized_at_rest_by_torchao_are_refused_by_name():
    from torchao.prototype.quantized_training import Int8QuantizedTrainingLinearWeight
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    for quantize in (Int8QuantizedTrainingLinearWeight.from_float, to_nf4):
        quantized = quantize(torch.randn(128, 128))
        model = nn.Linear(128, 128, bias=False)
        before = model.weight = nn.Parameter(quantized, requires_grad=False)
        message = rf"weight is a {type(quantized).__name__} of \d tensors"
        with pytest.raises(NotImplementedError, match=message):
            fully_shard(model)
        assert model.weight is before
