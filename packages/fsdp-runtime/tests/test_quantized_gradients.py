"""Gradients that travel quantized: against one process that does the same to full gradients, by bits."""

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import assert_same_gradients, loss_of, plain_backward, same_bits, seeded, shard, tokens

from fsdp_runtime import MixedPrecisionPolicy, QuantizationPolicy
from fsdp_runtime.memory import unit_memory
from fsdp_runtime.quantization import BlockInt8
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives

BF16 = QuantizationPolicy(gradients="bf16")


@pytest.mark.parametrize("precision", [{}, {"param_dtype": torch.bfloat16}], ids=["fp32", "bf16"])
@on_ranks(3)
def test_a_unit_sends_two_bytes_an_element_in_one_all_to_all(precision):
    ranks = dist.get_world_size()
    model = shard(seeded(), quantization_policy=BF16, mp_policy=MixedPrecisionPolicy(**precision))
    loss = loss_of(model, tokens())
    with record_collectives() as record:
        loss.backward()
    reductions = [event for event in record.events if event.kind != "all_gather"]
    assert [event.kind for event in reductions] == ["all_to_all"] * 4  # three blocks and the root
    units = [*model.blocks[::-1], model]
    for event, unit in zip(reductions, units, strict=True):
        memory = unit_memory(unit)
        assert event.bytes_sent == 2 * (ranks - 1) * sum(memory.shards)
        copies = 1 if precision.get("param_dtype") == torch.bfloat16 else 2
        assert memory.scratch == copies * 2 * ranks * sum(memory.shards)
    assert model.head.weight.grad.dtype == torch.float32


@on_ranks(4)
def test_the_all_reduce_over_replicas_stays_fp32():
    mesh = rank_mesh(2, 2, names=("replicas", "shards"))
    model = shard(seeded(blocks=1), quantization_policy=BF16, mesh=mesh)
    loss = loss_of(model, tokens())
    with record_collectives() as record:
        loss.backward()
    assert_same_gradients(
        model, plain_backward(seeded(blocks=1)), rtol=2.0**-7, atol=1e-3
    )  # bf16 inside a replica
    replicated = sum(event.bytes_sent for event in record.events if event.kind == "all_reduce")
    shards = sum(unit_memory(model).shards) + sum(unit_memory(model.blocks[0]).shards)
    assert replicated == 4 * shards


INT8 = QuantizationPolicy(gradients=BlockInt8(256, rounding="stochastic"))


def gradients_of(model, step):
    model.set_reduction_step(step)
    model.zero_grad()
    for _ in range(2):  # two reductions in a step
        loss_of(model, tokens()).backward()
    return [param.grad.full_tensor() for param in model.parameters() if param.requires_grad]


@on_ranks(3)
def test_stochastic_rounding_follows_the_step_so_that_a_resumed_run_repeats_it():
    uninterrupted, other = (shard(seeded(), quantization_policy=INT8) for _ in range(2))
    steps = [gradients_of(uninterrupted, step) for step in range(3)]
    for step in (2, 0):
        assert same_bits(gradients_of(other, step), steps[step])
        assert not same_bits(steps[step], steps[1])
    for model in (uninterrupted, other):  # what is reduced changes, and with it the memory
        model.norm.weight.requires_grad_(False)
    gradients_of(uninterrupted, 1)
    assert same_bits(gradients_of(uninterrupted, 3), gradients_of(other, 3))
    for wrong, kind in ((1.0, TypeError), (True, TypeError), (-1, ValueError)):
        with pytest.raises(kind, match="set_reduction_step: step"):
            other.set_reduction_step(wrong)
