"""Weights and gradients that travel as codes: against one process that does the same to whole tensors."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from quantized_steps import Plain, accumulate, assert_equal_bits, descend, read_back
from runtime_helpers import (
    assert_same_gradients,
    loss_of,
    of_values,
    plain_backward,
    same_bits,
    seeded,
    shard,
    tokens,
)
from torch import nn

from fsdp_runtime import MixedPrecisionPolicy, QuantizationPolicy, fully_shard
from fsdp_runtime.memory import unit_memory
from fsdp_runtime.quantization import BlockFP8, BlockInt8, BlockNF4, matrices_only
from fsdp_runtime.quantization.on_wire import common_block
from layout_planner import Elements, Rows, TensorSpec, Tile, Whole
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives

FP8, INT8 = BlockFP8((4, 4)), BlockInt8(4)
WIDTH = 24


def body():
    return seeded(width=WIDTH, blocks=2)


def train(fmt, steps=2, microbatches=1, **options):
    plain = Plain(body, partial(read_back, fmt))
    policy = QuantizationPolicy(weights=fmt, gradients="bf16")
    model = shard(body(), quantization_policy=policy, **options)
    for step in range(steps):
        plain.step(step, microbatches)
        accumulate(model, step, microbatches)
        descend(model.parameters())
    assert_equal_bits(model, plain.masters)


@on_ranks(3)
def test_modules_compute_with_the_values_of_whole_tensors_codes():
    train(FP8)
    train(INT8, microbatches=2)


@on_ranks(4)
def test_resharding_to_neighbors_keeps_slices_of_the_gathered_values():
    train(FP8, reshard_after_forward=2)
    model = shard(body(), quantization_policy=QuantizationPolicy(weights=FP8), reshard_after_forward=2)
    loss = loss_of(model, tokens())
    with record_collectives() as record:
        loss.backward()
    last = [event for event in record.events if event.kind == "all_gather"][-1]
    assert (last.ranks, last.bytes_sent) == (2, sum(unit_memory(model.blocks[0]).gathered) // 2)


@on_ranks(3)
def test_a_unit_sends_its_codes_scales_and_other_parameters_in_one_call():
    model = shard(body(), quantization_policy=QuantizationPolicy(weights=FP8))
    sent = [2 * unit_memory(unit).sent for unit in (model, *model.blocks)]
    for step in range(2):
        with record_collectives() as record:
            loss_of(model, tokens(step)).backward()
        assert {event.kind for event in of_values(record)} == {"all_gather", "reduce_scatter"}
        gathers = [event.bytes_sent for event in record.events if event.kind == "all_gather"]
        assert gathers == [*sent, *sent[:0:-1]]  # each unit once in forward, each block again in backward
        descend(model.parameters())


@on_ranks(2)
def test_an_infinite_weight_makes_gradients_nan_and_the_step_is_skipped():
    from block_optim import AdamW

    model = shard(
        body(),
        quantization_policy=QuantizationPolicy(weights=FP8, gradients=BlockInt8(8, rounding="stochastic")),
    )
    optimizer = AdamW(model.parameters(), lr=1e-3)
    weight = model.blocks[0].weight
    if dist.get_rank() == 0:
        weight.detach().to_local().view(-1)[0] = torch.inf
    before = model.head.weight.full_tensor()
    loss = loss_of(model, tokens())
    assert loss.isnan()
    loss.backward()
    assert model.head.weight.grad.full_tensor().isnan().any()
    optimizer.step()
    assert model.head.weight.full_tensor().equal(before)


@on_ranks(1)
def test_parameters_of_other_dtypes_that_are_not_selected_are_left_alone():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
    none = QuantizationPolicy(weights=FP8, select=lambda name, param, module: False)
    fully_shard(model, quantization_policy=none)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(
        nn.Linear(8, 8).to(torch.bfloat16),
        quantization_policy=QuantizationPolicy(weights=INT8),
        mp_policy=precision,
    )


NF4 = BlockNF4(64)
WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"weights": "fp8"}, "expected BlockFP8, BlockInt8 or None"),
    ({"weights": BlockInt8(256, rounding="stochastic")}, "weights are rounded to nearest only"),
    ({"weights": FP8, "select": "all"}, r"expected \(name, parameter, module\) -> bool"),
    ({"gradients": "fp8"}, "expected 'bf16', BlockInt8 or None"),
    ({}, "nothing is quantized"),
    ({"at_rest": "nf4"}, "expected BlockNF4, BlockInt8, BlockFP8 or None"),
    ({"at_rest": BlockInt8(64, rounding="stochastic")}, "weights are rounded to nearest only"),
    ({"at_rest": NF4, "weights": FP8}, "codes at rest travel as they are"),
    ({"at_rest": NF4, "gradients": INT8}, "selected weights have no gradients"),
)


def test_options_that_do_not_go_together_are_refused():
    for options, message in WRONG:
        with pytest.raises(ValueError, match=message):
            QuantizationPolicy(**options)


def test_matrices_are_told_from_embeddings_heads_norms_and_routers():
    matrix, linear = torch.empty(4, 4), nn.Linear(4, 4)
    for name in ("weight", "attn.q_proj.weight", "mlp.gate_proj.weight", "experts.w1", "output_proj.weight"):
        assert matrices_only(name, matrix, linear), name
    others = "lm_head.weight head.weight embed_tokens.weight mlp.gate.weight router.weight norm.w"
    for name in others.split():
        assert not matrices_only(name, matrix, linear), name
    assert not matrices_only("weight", matrix, nn.Embedding(4, 4))
    assert not matrices_only("weight", torch.empty(4), linear)
    assert not matrices_only("weight", matrix.int(), linear)


BLOCKS = (None, Rows(1), Rows(6), Tile(3, 2), Elements(10), Whole())


@pytest.mark.parametrize("shape", [(40, 6), (3, 12, 4), (3, 10, 4), (7,)])
def test_a_common_block_is_cut_only_where_tiles_and_the_policy_allow(shape):
    for block in BLOCKS if len(shape) > 1 else (*BLOCKS[:3], *BLOCKS[4:]):
        common = TensorSpec("t", shape, common_block(4, block, shape)).grid
        asked = TensorSpec("t", shape, block or Rows(1)).grid
        tiles = TensorSpec("t", shape, Whole() if len(shape) == 1 else Tile(4, 1)).grid
        cuts = [offset for offset in range(common.numel + 1) if common.is_cut(offset)]
        assert all(asked.is_cut(offset) and tiles.is_cut(offset) for offset in cuts), block


IN_BF16 = QuantizationPolicy(gradients="bf16")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@on_ranks(3)
def test_a_unit_sends_two_bytes_an_element_in_one_all_to_all(dtype):
    ranks = dist.get_world_size()
    model = shard(seeded(), quantization_policy=IN_BF16, mp_policy=MixedPrecisionPolicy(dtype, dtype))
    loss = loss_of(model, tokens())
    with record_collectives() as record:
        loss.backward()
    reductions = [event for event in of_values(record) if event.kind != "all_gather"]
    assert [event.kind for event in reductions] == ["all_to_all"] * 4  # three blocks and the root
    units = [*model.blocks[::-1], model]
    for event, unit in zip(reductions, units, strict=True):
        memory = unit_memory(unit)
        assert event.bytes_sent == 2 * (ranks - 1) * sum(memory.shards)
        copies = 1 if dtype == torch.bfloat16 else 2
        assert memory.scratch == copies * 2 * ranks * sum(memory.shards)
    assert model.head.weight.grad.dtype == torch.float32


@on_ranks(4)
def test_the_all_reduce_over_replicas_stays_fp32():
    mesh = rank_mesh(2, 2, names=("replicas", "shards"))
    model = shard(seeded(blocks=1), quantization_policy=IN_BF16, mesh=mesh)
    loss = loss_of(model, tokens())
    with record_collectives() as record:
        loss.backward()
    assert_same_gradients(
        model, plain_backward(seeded(blocks=1)), rtol=2.0**-7, atol=1e-3
    )  # bf16 inside a replica
    replicated = sum(event.bytes_sent for event in of_values(record) if event.kind == "all_reduce")
    shards = sum(unit_memory(model).shards) + sum(unit_memory(model.blocks[0]).shards)
    assert replicated == 4 * shards


STOCHASTIC = QuantizationPolicy(gradients=BlockInt8(256, rounding="stochastic"))


def gradients_of(model, step):
    model.set_reduction_step(step)
    model.zero_grad()
    for _ in range(2):  # two reductions in a step
        loss_of(model, tokens()).backward()
    return [param.grad.full_tensor() for param in model.parameters() if param.requires_grad]


@on_ranks(3)
def test_stochastic_rounding_follows_the_step_so_that_a_resumed_run_repeats_it():
    uninterrupted, other = (shard(seeded(), quantization_policy=STOCHASTIC) for _ in range(2))
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
