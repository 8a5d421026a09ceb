"""Ways of getting values into a buffer, and RaggedDTensors out of it."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dbuffer_helpers import (
    SPECS,
    assert_locals_equal,
    full_tensors,
    layout_for,
    make,
    mesh_of,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

import dbuffer
from dbuffer import DBuffer
from ragged_shard import RaggedDTensor, distribute_tensor
from ragged_shard.testing import RankError, record_collectives, run_ranks


def fill_from_all(dtype):
    buffer = make(dtype=dtype)
    with record_collectives() as record:
        buffer.load_full(full_tensors())
    assert record.kinds == []
    assert_locals_equal(buffer, full_tensors())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_tensors_on_all_ranks_fill_without_communication(dtype):
    run_ranks(3, fill_from_all, dtype)


def fill_from_one(layout, shape, src):
    buffer = make(layout, mesh=mesh_of(*shape))
    source = dist.get_rank() == src
    buffer.load_from_rank(full_tensors() if source else None, src)
    assert_locals_equal(buffer, full_tensors())


@pytest.mark.parametrize(
    ("shape", "src"), [((1,), 0), ((2,), 1), ((3,), 0), ((4,), 2), ((2, 2), 0), ((2, 2), 1)]
)
def test_one_rank_fills_all(shape, src):
    world_size = torch.Size(shape).numel()
    for layout in ("planned", "split"):
        run_ranks(world_size, fill_from_one, layout, shape, src)


def fill_wrongly(tensors):
    buffer = make()
    buffer.load_from_rank(tensors if dist.get_rank() == 0 else None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("bias"), "bias is missing"),
        (lambda t: t.update(bias=torch.zeros(4)), r"bias: shape \(4,\); the layout says \(5,\)"),
        (lambda t: t.update(extra=torch.zeros(4)), "extra is not in the layout"),
        (lambda t: t.update(bias=torch.zeros(5, device="meta")), "bias: a meta tensor has no values"),
    ],
)
def test_a_source_with_wrong_tensors_makes_every_rank_raise_and_name_them(change, message):
    tensors = full_tensors()
    change(tensors)
    with pytest.raises(RankError) as caught:
        run_ranks(3, fill_wrongly, tensors, timeout=20)
    assert sorted(caught.value.causes) == [0, 1, 2]
    for cause in caught.value.causes.values():
        with pytest.raises(ValueError, match=message):
            raise cause


def init_fn(name, full, generator):
    if name == "bias":
        full.zero_()
    else:
        full.normal_(0, 0.02, generator=generator)


def initialized():
    buffer = make()
    seen = []
    buffer.initialize(lambda name, full, g: (seen.append(name), init_fn(name, full, g)), seed=3)
    held = [name for name, view in buffer.local_views.items() if view.numel()]
    assert seen == held
    buffer.all_gather().wait()
    return {name: view.clone() for name, view in buffer.views.items()}


def test_initial_values_do_not_depend_on_the_number_of_ranks():
    (alone,) = run_ranks(1, initialized)
    assert alone["weight"].std() > 0
    assert not alone["weight"].flatten()[:20].equal(alone["cube"].flatten()[:20])
    for world_size in (2, 3, 4):
        for tensors in run_ranks(world_size, initialized):
            for name, value in alone.items():
                assert tensors[name].equal(value), name


def optimize(shape):
    """An optimizer step on the ragged tensors is in the next gather, with nothing copied back."""
    buffer = make(mesh=mesh_of(*shape))
    buffer.load_full(full_tensors())
    with record_collectives() as record:
        tensors = buffer.ragged_tensors(requires_grad=True)
    assert record.kinds == []
    shards = {shard.untyped_storage().data_ptr() for shard in buffer.shard}
    for name, tensor in tensors.items():
        assert isinstance(tensor, RaggedDTensor)
        assert tuple(tensor.shape) == tuple(buffer.layout.spec(name).shape)
        assert tensor.to_local().untyped_storage().data_ptr() in shards
        tensor.grad = torch.ones_like(tensor)
    torch.optim.SGD(tensors.values(), lr=1.0).step()
    buffer.all_gather().wait()
    for name, want in full_tensors().items():
        assert buffer.views[name].equal(want - 1), name
        assert tensors[name].full_tensor().equal(want - 1), name


@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (2, 2)])
def test_ragged_tensors_are_the_shard_itself(shape):
    run_ranks(torch.Size(shape).numel(), optimize, shape)


def from_distributed(kind):
    mesh, tensors = mesh_of(), full_tensors()
    if kind == "same":
        given = make(mesh=mesh).load_full(tensors).ragged_tensors()
    elif kind == "other":
        given = make("split", mesh=mesh).load_full(tensors).ragged_tensors()
    else:
        placement = {"replicate": Replicate(), "shard": Shard(0)}[kind]
        given = {
            name: torch_distribute_tensor(value, mesh, [placement if value.ndim else Replicate()])
            for name, value in tensors.items()
        }
    with record_collectives() as record:
        buffer = DBuffer.from_dtensors(
            given, layout_for(mesh.size()), mesh, dtype=torch.float32, check_ranks=False
        )
    assert_locals_equal(buffer, tensors)
    assert ("all_to_all" in record.kinds) == (kind in ("other", "shard"))


@pytest.mark.parametrize("kind", ["same", "other", "replicate", "shard"])
def test_a_buffer_is_built_from_distributed_tensors_of_any_placement(kind):
    run_ranks(3, from_distributed, kind)


def save(path, layout):
    tensors = make(layout).load_full(full_tensors()).ragged_tensors()
    dcp.save(tensors, checkpoint_id=path)


def load(path, layout):
    buffer = make(layout)
    dcp.load(buffer.ragged_tensors(), checkpoint_id=path)
    assert_locals_equal(buffer, full_tensors())


def load_plain(path):
    tensors = {spec.name: torch.zeros(spec.shape) for spec in SPECS}
    dcp.load(tensors, checkpoint_id=path)
    for name, value in full_tensors().items():
        assert tensors[name].equal(value)


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_the_ragged_tensors_loads_straight_into_the_shards_of_another_layout(tmp_path):
    run_ranks(3, save, tmp_path, "planned")
    run_ranks(2, load, tmp_path, "split")
    run_ranks(4, load, tmp_path, "planned")
    run_ranks(1, load_plain, tmp_path)


def redistribute():
    tensors = make().load_full(full_tensors()).ragged_tensors()
    even = tensors["weight"].redistribute(placements=[Shard(0)])
    assert even.full_tensor().equal(full_tensors()["weight"])
    again = distribute_tensor(
        full_tensors()["weight"], tensors["weight"].device_mesh, tensors["weight"].placements
    )
    assert again.to_local().equal(tensors["weight"].to_local())
    assert not isinstance(again.to_local(), DTensor)


def test_ragged_tensors_redistribute_like_any():
    run_ranks(3, redistribute)


def mixed_plain():
    tensors = full_tensors()
    tensors["weight"] = torch_distribute_tensor(tensors["weight"], mesh_of(), [Replicate()])
    make().load_full(tensors)


def plain_for_dtensors():
    mesh = mesh_of()
    DBuffer.from_dtensors(full_tensors(), layout_for(2), mesh, dtype=torch.float32)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (mixed_plain, "weight: a DTensor; expected a plain full tensor"),
        (plain_for_dtensors, "weight: a Tensor; expected a distributed tensor"),
    ],
)
def test_the_wrong_kind_of_tensor_raises_and_names_the_right_way(fn, message):
    with pytest.raises(RankError, match=message):
        run_ranks(2, fn)


def test_the_public_names_are_those_of_the_package():
    assert all(hasattr(dbuffer, name) for name in dbuffer.__all__)
