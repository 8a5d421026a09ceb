"""Whole tensors out of a sharded model, in step, in bounded memory."""

import itertools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import (
    TwoLayers,
    assert_same_values,
    full_values,
    on_meta,
    seeded,
    shard,
    shard_with_tensor_parallelism,
)
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor

from fsdp_runtime import MixedPrecisionPolicy, QuantizationPolicy, fully_shard, iter_full_params
from fsdp_runtime.quantization import BlockFP8, BlockInt8
from fsdp_runtime.train.plan import LiveBytes
from ragged_shard.dist import gather_from_ranks
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives


def collected(model, **options):
    return {name: tensor.clone() for name, tensor in iter_full_params(model, **options)}


def everything(bucket_bytes, ranks, options):
    model = shard(seeded(width=16, tied=True), **options)
    wanted = dict(seeded(width=16, tied=True).named_parameters())
    found = collected(model, bucket_bytes=bucket_bytes, ranks=ranks)
    if ranks is not None and dist.get_rank() not in ranks:
        assert not found
        return
    assert_same_values(found, wanted)
    assert all(type(value) is torch.Tensor for value in found.values())


@pytest.mark.parametrize("size", [1, 3])
@on_ranks("size")
def test_receivers_get_every_parameter_once_and_the_others_nothing(size):
    for bucket_bytes, ranks in (
        (1, None), (2000, None), (1 << 30, None), (2000, (1,)), (1 << 30, (0, 2)),
    ):  # fmt: skip
        if ranks is None or max(ranks) < size:
            everything(bucket_bytes, ranks, {})


@on_ranks(2)
def test_values_come_in_the_dtype_asked_for_and_a_quantized_gather_rounds_none():
    quantize = QuantizationPolicy(weights=BlockFP8((8, 8)))
    everything(1 << 20, None, {"quantization_policy": quantize})
    bf16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    model = shard(seeded(), mp_policy=bf16)
    for name, value in collected(model, dtype=torch.bfloat16).items():
        assert value.equal(dict(seeded().named_parameters())[name].bfloat16())


@on_ranks(2)
def test_codes_and_plain_parameters_come_too():
    quantize = QuantizationPolicy(at_rest=BlockInt8(8))
    model = seeded()
    model.blocks[0].requires_grad_(False)
    ignored = {model.norm.weight}
    fully_shard(model.blocks[0], quantization_policy=quantize)
    fully_shard(model, ignored_params=ignored)
    found = collected(model)
    assert found.keys() == dict(seeded().named_parameters()).keys()
    assert found["norm.weight"].data_ptr() != model.norm.weight.data_ptr()
    assert found["blocks.0.weight"].equal(model.blocks[0].weight.full_tensor())
    with pytest.raises(ValueError, match="weight is on the meta device and has no values"):
        iter_full_params(on_meta())


@pytest.mark.parametrize("dtype", [torch.int16, torch.float8_e4m3fn])
@on_ranks(3)
def test_dtypes_that_gloo_does_not_move_come_too(dtype):
    model = nn.Module()
    for name, rows in (("five", 5), ("seven", 7)):
        model.register_parameter(name, nn.Parameter(torch.arange(rows).to(dtype), requires_grad=False))
    fully_shard(model)
    for bucket_bytes, ranks in itertools.product((1, 1 << 20), (None, (0, 1, 2), (1,))):
        options: Any = {"bucket_bytes": bucket_bytes, "ranks": ranks}
        exported = collected(model, **options)
        receives = ranks is None or dist.get_rank() in ranks
        assert exported.keys() == ({"five", "seven"} if receives else set())
        assert all(value.float().equal(torch.arange(len(value)).float()) for value in exported.values())


@on_ranks(4)
def test_replicas_and_tensor_parallel_parameters_are_exported():
    wanted = seeded(TwoLayers).state_dict()
    for replicas, ranks in itertools.product((2, 4, None), (None, (2,))):
        shape = (replicas, 4 // replicas) if replicas else (2, 2)
        mesh = rank_mesh(*shape, names=("replicate", "shard") if replicas else ("dp", "tp"))
        model = seeded(TwoLayers)
        model = fully_shard(model, mesh=mesh) if replicas else shard_with_tensor_parallelism(model, mesh)
        receives = ranks is None or dist.get_rank() in ranks
        assert_same_values(collected(model, ranks=ranks), wanted if receives else {})


class Wide(nn.Module):
    """Eight matrices of 16 KiB in one unit."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.randn(64, 64)) for _ in range(8)])


def peak(model, pause, **options):
    """The most bytes alive on a rank. gloo's thread lets go of a broadcast's tensors a moment after it completed."""
    with LiveBytes() as live:
        for _ in iter_full_params(model, **options):
            time.sleep(pause)
    return max(gather_from_ranks(live.peak))


@pytest.mark.parametrize(("ranks", "dtype", "size"), [(None, None, 4), ((0,), torch.bfloat16, 2)])
@on_ranks(2)
def test_memory_is_bounded_by_the_bucket(ranks, dtype, size):
    model, one = fully_shard(seeded(Wide)), 64 * 64 * size
    # A tensor is the least.
    for bucket, receivers, most in ((3 * one, ranks, 3 * one), (6 * one, ranks, 6 * one), (1, None, 2 * one)):
        limit = most + 1000  # collectives' own small tensors
        options = {"bucket_bytes": bucket, "ranks": receivers, "dtype": dtype}
        # A moment is longer on a busy machine.
        assert any(peak(model, pause, **options) <= limit for pause in (0.05, 0.3, 1.0)), (bucket, limit)


@on_ranks(2)
def test_a_receiver_is_sent_what_it_lacks_and_a_whole_unit_by_one_collective():
    total, model = 8 * 64 * 64 * 4, fully_shard(seeded(Wide))
    for bucket_bytes, ranks, sent in (
        (1 << 20, None, total),
        (1, (0,), total / 2),
        (1 << 20, (0,), total / 2),
    ):
        with record_collectives() as record:
            list(iter_full_params(model, bucket_bytes=bucket_bytes, ranks=ranks))
        large = [event for event in record.events if event.bytes_sent >= 4096]
        assert ranks is not None or len(large) == 1
        assert sum(gather_from_ranks(sum(event.bytes_sent for event in large))) == sent


@on_ranks(2)
def test_tensors_that_no_unit_has_are_the_callers_too():
    mesh, model = rank_mesh(), nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate()]))
    before = {name: value.clone() for name, value in full_values(model).items()}
    for _, tensor in iter_full_params(model):
        tensor.zero_()
    assert_same_values(full_values(model), before)
