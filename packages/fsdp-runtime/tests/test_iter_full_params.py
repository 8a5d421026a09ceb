"""Whole tensors out of a sharded model, in step, in bounded memory; and only what changed."""

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

from fsdp_runtime import (
    MixedPrecisionPolicy,
    QuantizationPolicy,
    block_policies,
    fully_shard,
    iter_full_params,
)
from fsdp_runtime.checkpoint import ExportedParams
from fsdp_runtime.quantization import BlockFP8, BlockInt8
from ragged_shard import distribute_like, gather_from_ranks
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives, record_memory


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


@on_ranks(3)
def test_receivers_get_every_parameter_once_and_the_others_nothing():
    for bucket_bytes, ranks in (
        (1, None), (2000, None), (1 << 30, None), (2000, (1,)), (1 << 30, (0, 2)),
    ):  # fmt: skip
        everything(bucket_bytes, ranks, {})


@on_ranks(1)
def test_one_rank_exports_too():
    everything(2000, None, {})


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
        since_nothing = iter_full_params(model, changed_since=ExportedParams(), **options)
        changes = {change.name: change.values for change in since_nothing}
        receives = ranks is None or dist.get_rank() in ranks
        assert exported.keys() == changes.keys() == ({"five", "seven"} if receives else set())
        assert all(value.float().equal(torch.arange(len(value)).float()) for value in exported.values())


@on_ranks(4)
def test_replicas_and_tensor_parallel_parameters_are_exported():
    wanted = seeded(TwoLayers).state_dict()
    for replicas, ranks in itertools.product((2, 4, None), (None, (2,))):
        shape = (replicas, 4 // replicas) if replicas else (2, 2)
        mesh = rank_mesh(*shape, names=("replicate", "shard") if replicas else ("dp", "tp"))
        model, exported = seeded(TwoLayers), ExportedParams()
        model = fully_shard(model, mesh=mesh) if replicas else shard_with_tensor_parallelism(model, mesh)
        receives = ranks is None or dist.get_rank() in ranks
        assert_same_values(collected(model, ranks=ranks), wanted if receives else {})
        list(iter_full_params(model, ranks=ranks, changed_since=exported))
        with torch.no_grad():
            model.up.weight.mul_(2)
        changed = {one.name for one in iter_full_params(model, ranks=ranks, changed_since=exported)}
        assert changed == ({"up.weight"} if receives else set())


# -- memory and traffic ------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Eight matrices of 16 KiB in one unit."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.randn(64, 64)) for _ in range(8)])


def peak(model, pause, **options):
    """The most bytes alive on a rank. gloo's thread lets go of a broadcast's tensors a moment after it completed."""
    with record_memory() as live:
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


# -- only what changed -------------------------------------------------------------------------------------------------


class Engine:
    """Holds full tensors, and counts what it is sent."""

    def __init__(self, model):
        self.tensors = {name: torch.full_like(p, 7) for name, p in model.named_parameters()}
        self.elements = 0

    def update(self, changes):
        self.elements = 0
        names = set()
        for change in changes:
            change.apply_to(self.tensors[change.name])
            self.elements += change.values.numel()
            names.add(change.name)
        return names


def write(param, row, value):
    """One element of one row, on the rank that has it."""
    full = param.full_tensor().detach()
    full.view(full.shape[0], -1)[row, 0] = value
    param.detach().copy_(distribute_like(full, param.detach(), src_data_rank=None))


@pytest.mark.parametrize(
    ("ranks", "bucket_bytes", "policy"),
    [(None, 1, None), (None, 1 << 20, block_policies.rows(4)), ((2,), 1 << 20, None), ((0, 1), 1, None)],
)
@on_ranks(3)
def test_only_changed_blocks_are_sent_and_none_is_missed(ranks, bucket_bytes, policy):
    model = shard(seeded(width=16), block_policy=policy)
    engine, exported = Engine(seeded(width=16)), ExportedParams()
    receives = ranks is None or dist.get_rank() in ranks
    options = {"ranks": ranks, "bucket_bytes": bucket_bytes, "changed_since": exported}

    def check(names, elements):
        found = engine.update(iter_full_params(model, **options))
        full = full_values(model)
        assert found == (names if receives else set())
        if receives:
            assert engine.elements == elements
            assert all(engine.tensors[name].equal(value) for name, value in full.items())

    every = dict(seeded(width=16).named_parameters())
    check(every.keys(), sum(p.numel() for p in every.values()))
    assert exported.nbytes == sum(p.to_local().nbytes for p in model.parameters())
    check(set(), 0)
    for row in (3, 4, 9):
        write(model.blocks[1].weight, row, 5)
    check({"blocks.1.weight"}, 3 * 16 * (1 if policy is None else 4))
    write(model.norm.bias, 0, -0.0)  # equal as a number, not in its bits
    check({"norm.bias"}, 1 if policy is None else 4)


@on_ranks(1)
def test_after_an_export_that_was_broken_off_everything_is_exported_again():
    model, exported = shard(seeded()), ExportedParams()
    list(iter_full_params(model, changed_since=exported))
    with torch.no_grad():
        model.blocks[0].weight.mul_(2)
    next(iter_full_params(model, changed_since=exported))
    assert not exported.complete
    again = {change.name for change in iter_full_params(model, changed_since=exported)}
    assert again == dict(model.named_parameters()).keys()


@on_ranks(2)
def test_an_export_to_other_receivers_is_complete():
    model, exported = shard(seeded()), ExportedParams()
    list(iter_full_params(model, ranks=(0,), changed_since=exported))
    names = {change.name for change in iter_full_params(model, ranks=(1,), changed_since=exported)}
    assert names == (dict(model.named_parameters()).keys() if dist.get_rank() == 1 else set())


@on_ranks(2)
def test_tensors_that_no_unit_has_are_the_callers_too():
    mesh, model = rank_mesh(), nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate()]))
    before = {name: value.clone() for name, value in full_values(model).items()}
    for _, tensor in iter_full_params(model):
        tensor.zero_()
    assert_same_values(full_values(model), before)


class Rows(nn.Module):
    """Rows of equal numbers, after another tensor that may be there."""

    def __init__(self, numbers, other):
        super().__init__()
        if other:
            self.other = nn.Parameter(torch.zeros(64))
        self.weight = nn.Parameter(torch.tensor(numbers).view(-1, 1).repeat(1, 64))


@on_ranks(3)
def test_where_the_layout_is_another_one_since_no_change_is_missed():
    """The second model has on rank 1 what the first had there, but in other rows of the tensor."""
    exported, engine, held = ExportedParams(), torch.empty(5, 64), []
    for numbers, other in (([1.0, 2, 3, 4, 5], False), ([1.0, 3, 4, 7, 8], True)):
        model = Rows(numbers, other)
        fully_shard(model)
        for change in iter_full_params(model, changed_since=exported):
            if change.name == "weight":
                change.apply_to(engine)
        weight: Any = model.weight
        assert engine.equal(weight.full_tensor())
        held.append(weight.to_local()[:, 0].tolist())
    assert dist.get_rank() != 1 or held == [[3.0, 4.0]] * 2
