"""What units are made of: block policies, groups, meshes, and refusals that change nothing."""

import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import (
    Body,
    assert_same_gradients,
    loss_of,
    on_meta,
    plain_backward,
    seeded,
    shard,
    tokens,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

import layout_planner
from fsdp_runtime import _torch_compat as compat
from fsdp_runtime import block_policies, fully_shard, set_full_state_dict
from fsdp_runtime import block_policies as bp
from fsdp_runtime._plan.mesh import DataMesh
from fsdp_runtime.memory import unit_memory
from layout_planner import Elements, Rows, Tile, Whole
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives, simulated_ranks

MATRIX, STACK, VECTOR, SCALAR = torch.empty(6, 4), torch.empty(3, 6, 4), torch.empty(4), torch.empty(())


def blocks(policy):
    return [policy(name, t) for name, t in zip("msvs", (MATRIX, STACK, VECTOR, SCALAR), strict=True)]


class Declares:
    @staticmethod
    def block_policy():
        return bp.by_pattern({"m": Whole()})


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (bp.rows(3), [Rows(3)] * 4),
        (bp.elements(7), [Elements(7)] * 4),
        (bp.tiles(2, 2), [Tile(2, 2), Tile(2, 2), None, None]),
        (bp.whole(), [Whole(), Tile(6, 4), None, None]),
        (bp.by_pattern({"^m": Rows(2), "s|v": bp.whole()}), [Rows(2), Tile(6, 4), None, None]),
        (bp.declared_by(Declares, bp.rows(5)), [Whole(), Rows(5), Rows(5), Rows(5)]),
    ],
)
def test_each_policy_names_its_blocks_and_can_be_pickled(policy, wanted):
    assert blocks(policy) == wanted
    assert blocks(pickle.loads(pickle.dumps(policy))) == wanted


@on_ranks(2)
def test_a_planner_of_the_callers_packs_every_group():
    seen = []

    def planner(tensors, world_size, *, align):
        seen.append([spec.name for spec in tensors])
        return layout_planner.plan(tensors, world_size, align=4 * align)

    model = shard(seeded(blocks=2), planner=planner)  # of equal blocks too
    loss_of(model, tokens()).backward()
    assert seen == [["weight", "bias"]] * 2 + [["embed.weight", "norm.weight", "norm.bias", "head.weight"]]


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return self.out(torch.tanh(self.up(x)))


class Layers(Body):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Layer(8) for _ in range(3))


def of_layers(model, **options):
    fully_shard([block.out for block in model.blocks], reshard_after_forward=False, **options)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def test_its_blocks_share_one_layout_so_that_few_blocks_of_each_layer_do_not_pad():
    with simulated_ranks(4):
        policy = block_policies.rows(4)  # two blocks a layer: six for four ranks
        together = unit_memory(of_layers(seeded(Layers), block_policy=policy).blocks[0].out)
        alone = seeded(Layers)
        each = [unit_memory(fully_shard(block.out, block_policy=policy)) for block in alone.blocks]
        assert (together.parameters, together.padding) == (3 * 8 * 32, 2 * 4 * 32)
        assert sum(unit.padding for unit in each) == 3 * 2 * 4 * 32


@on_ranks(4)
def test_a_unit_on_several_meshes_gathers_and_reduces_once_for_each():
    """Matrices on all ranks, vectors with replicas."""
    hybrid = rank_mesh(2, 2, names=("copies", "cut"))
    model = shard(
        seeded(width=16),
        mesh=rank_mesh(4, names=("fsdp",)),
        shard_placement_fn=lambda param: hybrid if param.ndim == 1 else None,
    )
    for _ in range(4):
        with record_collectives() as record:
            loss_of(model, tokens()).backward()
    # 4 units of two meshes each: gathered in forward, 3 again in backward; replicas are reduced for one of the two.
    # Which parameters were used: over the ranks of one mesh, and the two axes of the other.
    counts = [record.kinds.count(kind) for kind in ("all_gather", "reduce_scatter", "all_reduce")]
    assert counts == [14, 8, 4 + 3]
    memory = unit_memory(model.blocks[0])
    assert (memory.shards, memory.padding) == ((64, 8), 0)  # a quarter of the matrix, half of the vector


def of_each_seed(shape):
    mesh = rank_mesh(*shape, names=("replicate", "shard")[-len(shape) :])
    return shard(seeded(seed=dist.get_rank()), mesh=mesh)


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
@on_ranks("shape")
def test_a_model_of_another_seed_on_each_rank_is_refused_in_each_forward(shape):
    model = of_each_seed(shape)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"different values of .*torch.manual_seed.*set_full_state_dict"
        ):
            model(tokens())
    with torch.no_grad():
        set_full_state_dict(
            model, seeded(seed=7).state_dict() if dist.get_rank() == 0 else {}, rank0_only=True
        )
    loss_of(model, tokens()).backward()
    assert_same_gradients(model, plain_backward(seeded(seed=7)))


LOADS = {
    "assigned": lambda model, whole: set_model_state_dict(
        model, whole, options=StateDictOptions(full_state_dict=True)
    ),
    "initialized": lambda model, _: [nn.init.ones_(param) for param in model.parameters()],
    "through data": lambda model, _: [param.to_local().data.fill_(1) for param in model.parameters()],
    "moved": lambda model, whole: set_full_state_dict(model.to_empty(device="cpu"), whole),
}


@pytest.mark.parametrize("load", LOADS)
@on_ranks(2)
def test_values_before_others_were_loaded_do_not_count(load):
    model = of_each_seed((2,))
    with torch.no_grad():
        LOADS[load](model, seeded(seed=7).state_dict())
        model(tokens())


@on_ranks(2)
def test_a_model_that_only_rank_0_has_and_sends_is_not_compared():
    model = shard(seeded() if dist.get_rank() == 0 else on_meta())
    with torch.no_grad():
        if dist.get_rank():
            model.to_empty(device="cpu")
        set_full_state_dict(model, seeded().state_dict() if dist.get_rank() == 0 else {}, rank0_only=True)
        model(tokens())


def sharded_groups():
    with simulated_ranks(4, rank=1):
        return shard(seeded(), mesh=init_device_mesh("cpu", (4,)), reshard_after_forward=2)


def test_neighbors_are_those_of_the_new_process_groups():
    before = sharded_groups()
    assert sharded_groups() is not before  # and nothing asks for a group of before


class Bound:
    """The world of `init_process_group(device_id=)` on NCCL, as far as groups ask it."""

    bound_device_id, supports_splitting = torch.device("cpu", 0), True


@on_ranks(4)
def test_groups_of_a_mesh_are_split_from_its_own_where_the_world_would_have_to_join():
    mesh, asked = rank_mesh(2, 2, names=("stage", "data"))["data"], []

    def split(whole, parts, group_desc):
        asked.append((whole, parts, group_desc))
        return whole

    data = DataMesh(mesh)
    with (
        mock.patch.object(dist.distributed_c10d, "_get_default_group", Bound),
        mock.patch.object(dist.ProcessGroup, "_get_backend", return_value=Bound),
        mock.patch.object(dist, "split_group", split),
    ):
        data.reduction_group()
        compat.new_part(mesh.get_group(), [[0], [1]], "neighbors", "cpu")
    group = mesh.get_group()
    assert asked == [(group, [[0, 1]], "reductions"), (group, [[0], [1]], "neighbors")]


@on_ranks(4)
def test_ranks_with_neighbors_may_have_been_in_different_numbers_of_groups():
    for _ in range(dist.get_rank()):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model = shard(seeded(), mesh=rank_mesh(4), reshard_after_forward=2)
    loss_of(model, tokens()).backward()
    assert_same_gradients(model, plain_backward(seeded()))


@pytest.mark.long
@on_ranks(8)
def test_ranks_next_to_tensor_parallelism_have_neighbors_of_their_own():
    """Only the ranks of one column of a mesh are in its sub-mesh: a group that all ranks must make would hang."""
    mesh = rank_mesh(4, 2, names=("data", "tensor"))["data"]
    model = shard(seeded(), mesh=mesh, reshard_after_forward=2)
    loss_of(model, tokens(rank=mesh.get_local_rank())).backward()
    assert_same_gradients(model, plain_backward(seeded(), ranks=4))
