"""One unit whose parameters lie on several meshes: matrices on all ranks, the rest with replicas."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from runtime_helpers import (
    BF16,
    Body,
    assert_same_gradients,
    full_values,
    loss_of,
    on_meta,
    plain_backward,
    seeded,
    shard,
    tokens,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from dbuffer import BlockFP8, BlockInt8
from fsdp_runtime import QuantizationPolicy, fully_shard
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
def test_options_of_a_unit_hold_on_each_of_its_meshes():
    for options in (
        {"reshard_after_forward": 2},
        {"reshard_after_forward": False, "transport": "collectives"},
    ):
        model = sharded(**options)
        accumulated(model, 2)
        check_gradients(model, steps=2)
    model = sharded()
    model.set_separate_reduce_scatter_group()
    model.set_reduce_scatter_unused_params(True)
    model.set_requires_gradient_sync(False)
    loss_of(model, tokens(0)).backward()
    model.set_requires_gradient_sync(True)
    seen = []
    for block in model.blocks:
        block.set_all_reduce_hook(lambda flat: seen.append(flat.numel()))
    loss_of(model, tokens(1)).backward()
    check_gradients(model, steps=2)
    assert len(seen) == 6  # three units, two meshes each
    with pytest.raises(ValueError, match="HSDP"):
        model.blocks[0].set_all_reduce_hook(seen.append, stream=object())
    model = sharded(mp_policy=BF16)
    accumulated(model)
    check_gradients(model, rtol=0.1, atol=2e-2)


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


class Mixed(Body):
    """Vectors in another dtype than matrices; some frozen."""

    def __init__(self, **options):
        super().__init__(**options)
        for block in self.blocks:
            block.weight.data = block.weight.data.double()
            block.bias.data = block.bias.data.double()
        self.blocks[1].bias.requires_grad_(False)
        self.blocks[2].weight.requires_grad_(False)

    def forward(self, tokens, order=None):
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x.double()).float()) + x
        return self.head(self.norm(x))


@on_ranks(4)
def test_dtypes_and_frozen_parameters_differ_by_mesh():
    model = sharded(seeded(Mixed, width=16))
    accumulated(model)
    check_gradients(model, make=lambda **options: seeded(Mixed, **options))


class Branches(nn.Module):
    """Rank r uses expert r % 2 alone, and everyone the trunk."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.experts: Any = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x, which):
        x = torch.tanh(self.trunk(x))
        return x + self.experts[which](x) if which is not None else x


@on_ranks(4)
def test_experts_that_only_some_ranks_use_are_reduced_on_all():
    flat, hybrid, _ = two_meshes()
    for expert_of in ((0, 1, 0, 1), (0, None, None, None), (None, None, None, None)):
        model, alone = seeded(Branches), seeded(Branches)
        experts = set(model.experts.parameters())
        choose = lambda p, experts=experts: hybrid if p in experts else None  # noqa: E731
        fully_shard(model, mesh=flat, shard_placement_fn=choose)
        for rank in range(4):
            (alone(torch.full((2, 8), rank + 1.0), expert_of[rank]).square().mean() / 4).backward()
        rank = dist.get_rank()
        model(torch.full((2, 8), rank + 1.0), expert_of[rank]).square().mean().backward()
        for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
            whole = torch.zeros_like(wanted) if wanted.grad is None else wanted.grad
            mine: Any = distribute_like(whole, found, src_data_rank=None).to_local()  # type: ignore[attr-defined]
            if (
                found.grad is None
            ):  # as in FSDP2 where a rank neither used it nor holds what others contributed
                assert not mine.any()
            else:
                torch.testing.assert_close(found.grad.to_local(), mine, rtol=1e-5, atol=1e-6)


# -- what is chosen ----------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_meshes_without_names_of_one_rank_and_of_the_same_process_group():
    flat = rank_mesh(4)  # no names
    pairs = rank_mesh(4, 1, names=("x", "y"))
    model = shard(
        seeded(width=16), mesh=flat, shard_placement_fn=lambda p: pairs if p.ndim == 1 else None
    )  # 4 replicas, cut over an axis of one rank
    accumulated(model, 2)
    check_gradients(model, steps=2)
    again = rank_mesh(4, names=("other",))  # the same process group under another name
    model = shard(seeded(width=16), mesh=flat, shard_placement_fn=lambda p: again)
    assert counted(model) == [7, 4, 0]
    check_gradients(model)


# -- the rest of a unit's life -----------------------------------------------------------------------------------------


@on_ranks(4)
def test_a_checkpoint_is_loaded_on_one_mesh_on_exchanged_meshes_and_on_none(tmp_path):
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    accumulated(model)
    optimizer.step()
    dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path)
    whole = full_values(model)
    plain = seeded(width=16, seed=1)
    flat, hybrid, _ = two_meshes()
    exchanged = lambda p: flat if p.ndim == 1 else None  # noqa: E731
    others = [
        plain,
        shard(seeded(width=16, seed=2), mesh=flat),
        shard(seeded(width=16, seed=3), mesh=hybrid, shard_placement_fn=exchanged),
    ]
    for other in others:
        state = get_model_state_dict(other)
        dcp.load(state, checkpoint_id=tmp_path)
        set_model_state_dict(other, state)
        for name, value in full_values(other).items():
            assert torch.equal(value, whole[name]), name


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
