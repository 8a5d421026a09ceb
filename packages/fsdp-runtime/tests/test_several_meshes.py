"""One unit whose parameters lie on several meshes: matrices on all ranks, the rest with replicas."""

import torch
from runtime_helpers import (
    assert_same_gradients,
    loss_of,
    on_meta,
    plain_backward,
    seeded,
    shard,
    tokens,
)

from dbuffer.encodings import BlockFP8, BlockInt8
from fsdp_runtime import QuantizationPolicy
from fsdp_runtime.memory import unit_memory
from ragged_shard import distribute_like
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives


def two_meshes():
    """A mesh of all ranks for matrices, one with replicas for vectors; and the function that chooses."""
    flat = rank_mesh(4, names=("fsdp",))
    hybrid = rank_mesh(2, 2, names=("copies", "cut"))
    return flat, hybrid, lambda param: hybrid if param.ndim == 1 else None


def sharded(model=None, **options):
    flat, _, choose = two_meshes()
    return shard(model or seeded(width=16), mesh=flat, shard_placement_fn=choose, **options)


def accumulated(model, steps=1):
    for step in range(steps):
        loss_of(model, tokens(step)).backward()


def check_gradients(model, make=seeded, rtol=1e-5, atol=1e-6, steps=1, **options):
    alone = make(width=16, **options)
    for step in range(steps):
        plain_backward(alone, step)
    assert_same_gradients(model, alone, rtol=rtol, atol=atol)


def counted(model, step=0):
    with record_collectives() as record:
        loss_of(model, tokens(step)).backward()
    return [record.kinds.count(kind) for kind in ("all_gather", "reduce_scatter", "all_reduce")]


@on_ranks(4)
def test_a_unit_gathers_and_reduces_once_for_each_mesh():
    model = sharded()
    # 4 units of two meshes each: gathered in forward, 3 again in backward; replicas are reduced for one of the two
    assert counted(model) == [14, 8, 4]
    check_gradients(model)
    assert model.blocks[0].weight.device_mesh.mesh_dim_names == ("fsdp",)
    assert model.blocks[0].bias.device_mesh.mesh_dim_names == ("copies", "cut")


@on_ranks(4, timeout=120)
def test_weights_and_gradients_travel_quantized_on_each_mesh():
    flat, hybrid, _ = two_meshes()
    for policy in (
        QuantizationPolicy(weights=BlockFP8((8, 8))),
        QuantizationPolicy(weights=BlockFP8((8, 8)), gradients=BlockInt8(64)),
    ):
        model = seeded(width=16)
        apart = {model.blocks[0].weight, model.head.weight}  # matrices on both meshes
        choose = lambda p, apart=apart: hybrid if p in apart else None  # noqa: E731
        shard(model, mesh=flat, quantization_policy=policy, shard_placement_fn=choose)
        accumulated(model, 2)
        check_gradients(model, rtol=0.2, atol=2e-2, steps=2)


@on_ranks(4)
def test_a_unit_on_several_meshes_starts_on_the_meta_device():
    model = sharded(on_meta(width=16))
    memory = unit_memory(model.blocks[0])
    assert memory.parameters == 16 * 16 + 16
    assert memory.shards == (64, 8)  # a quarter of the matrix, half of the vector
    assert memory.padding == 0
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param, wanted in zip(model.parameters(), seeded(width=16).parameters(), strict=True):
            param.copy_(distribute_like(wanted.detach(), param, src_data_rank=None))
    accumulated(model)
    check_gradients(model)
