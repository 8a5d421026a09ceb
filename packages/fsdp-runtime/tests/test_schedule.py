"""The order of units and collectives, and which gathers run ahead by it."""

from typing import Any

import pytest
import torch
from runtime_helpers import Body, Watch, loss_of, seeded, shard, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_runtime import fully_shard
from fsdp_runtime._grads.buffer import Full
from fsdp_runtime._schedule.model import member_of
from ragged_shard.testing import SimulatedDevice, on_ranks, rank_mesh, simulated_ranks


def one_hybrid_mesh(meshes):
    return shard(seeded(blocks=4), mesh=meshes["hybrid"])


def meshes_of_units(meshes):
    """A unit after the other on another mesh."""
    model = seeded(blocks=4)
    for index, block in enumerate(model.blocks):
        mesh = (meshes["hybrid"], meshes["flat"], meshes["other way"]["shard"])[index % 3]
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=meshes["hybrid"])


def meshes_in_units(meshes):
    """Matrices of each unit on all ranks, vectors with replicas."""
    choose = lambda param: meshes["hybrid"] if param.ndim == 1 else None  # noqa: E731
    return shard(seeded(blocks=4), mesh=meshes["flat"], shard_placement_fn=choose)


def order_on(rank, build, buffers=2, depth=1, late_all_reduce=False):
    """Which mesh axis each collective of some steps is on, and its bytes."""
    with SimulatedDevice(), simulated_ranks(4, rank=rank) as simulation:
        meshes = {
            name: rank_mesh(*shape, names=names)
            for name, shape, names in (
                ("hybrid", (2, 2), ("replicate", "shard")),
                ("flat", (4,), ("shard",)),
                ("other way", (2, 2), ("shard", "replicate")),
            )
        }
        axes: dict[str, str] = {}
        for name, mesh in meshes.items():
            for axis in mesh.mesh_dim_names:
                axes.setdefault(mesh.get_group(axis).group_name, f"{name} {axis}")
        model = build(meshes)
        model.set_prefetch_depth(depth)
        model.set_reduce_scatter_max_input_buffers(buffers)
        start = len(simulation.calls)
        for step in range(3):
            model.set_requires_all_reduce(not late_all_reduce or step % 2 == 1)
            loss_of(model, tokens(step, rank=rank)).backward()
    return [(axes[group], nbytes) for group, nbytes in simulation.calls[start:]]


ORDERS: tuple[dict[str, Any], ...] = (
    {"build": meshes_of_units},
    {"build": meshes_in_units, "depth": 3},
    {"build": one_hybrid_mesh, "buffers": 1},
    {"build": one_hybrid_mesh, "buffers": 4, "late_all_reduce": True},
)


@pytest.mark.parametrize("case", ORDERS)
def test_gathers_reductions_and_all_reduces_come_in_the_same_order_on_all_ranks(case):
    first, *others = [order_on(rank, **case) for rank in range(4)]
    assert {axis for axis, _ in first} >= {"hybrid replicate", "hybrid shard"}
    assert all(order == first for order in others)


# -- gathers ahead -----------------------------------------------------------------------------------------------------


def gathered(block):
    """Whether all parameters of a block are gathered or on their way."""
    return member_of(block).unit.full is not Full.EMPTY


def ahead(model, **options):
    """For each block, as its forward begins: which blocks have been gathered, or are on their way."""
    seen = []

    def look(index):
        def hook(module, args):
            seen.append([i for i, block in enumerate(model.blocks) if gathered(block)])

        return hook

    handles = [block.register_forward_pre_hook(look(i)) for i, block in enumerate(model.blocks)]
    model(tokens(), **options)
    for handle in handles:
        handle.remove()
    return seen


@on_ranks(2)
def test_the_first_pass_in_an_order_gathers_on_demand_later_ones_ahead():
    model, on_demand = shard(seeded(blocks=4)), [[0], [1], [2], [3]]
    with torch.no_grad():
        assert ahead(model) == on_demand
        assert ahead(model) == [[0, 1], [1, 2], [2, 3], [3]]
        model.set_prefetch_depth(2)
        assert ahead(model) == [[0, 1, 2], [1, 2, 3], [2, 3], [3]]
        model.set_prefetch_depth(0)
        assert ahead(model) == on_demand
        model, order = shard(seeded(blocks=4)), [3, 2, 1, 0]
        ahead(model)
        assert all(index in seen for index, seen in zip(order, ahead(model, order=order), strict=True))
        assert ahead(model, order=order) == [[2, 3], [1, 2], [0, 1], [0]]
        assert ahead(model, order=[3, 1]) == [[2, 3], [0, 1, 2]]  # a unit that is skipped is passed over
        ahead(model, order=[0, 1, 0, 2])
        assert ahead(model, order=[0, 1, 0, 2]) == [[0, 1], [0, 1], [0, 2], [2]]  # one that runs twice
        assert not any(gathered(block) for block in model.blocks)  # what was gathered in vain is freed


class Block(nn.Linear):
    def forward(self, x):
        return super().forward(Watch.apply(x, self.look)) * 1


class Recomputed(Body):
    def forward(self, tokens, order=None):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(self.norm(x))


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_backward_gathers_the_unit_before(reentrant):
    model = seeded(Recomputed if reentrant else Body, blocks=3)
    model.blocks = nn.ModuleList(Block(8, 8) for _ in range(3))
    seen = []
    for index, block in enumerate(model.blocks):
        block.look = lambda index=index: seen.append(
            (index, [i for i, other in enumerate(model.blocks) if gathered(other)])
        )
    shard(model)
    for _ in range(3):
        seen.clear()
        loss_of(model, tokens()).backward()
    assert seen == [(2, [1, 2]), (1, [0, 1]), (0, [0])]
