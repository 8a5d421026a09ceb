"""Ways of getting values into a buffer, and RaggedDTensors out of it."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dbuffer_helpers import (
    SPECS,
    assert_locals_equal,
    full_tensors,
    make,
    mesh_of,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

import dbuffer
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


def fill_with(**changes):
    make().load_full({**full_tensors(), **changes})


def fill_without_bias():
    tensors = full_tensors()
    del tensors["bias"]
    make().load_full(tensors)


def fill_with_a_dtensor():
    fill_with(bias=torch_distribute_tensor(torch.zeros(5), mesh_of(), [Replicate()]))


@pytest.mark.parametrize(
    ("fill", "changes", "message"),
    [
        (fill_without_bias, {}, "bias is missing"),
        (fill_with, {"bias": torch.zeros(4)}, r"bias: shape \(4,\); the layout says \(5,\)"),
        (fill_with, {"extra": torch.zeros(4)}, "extra is not in the layout"),
        (fill_with, {"bias": torch.zeros(5, device="meta")}, "bias: a meta tensor has no values"),
        (fill_with_a_dtensor, {}, "bias: a DTensor; expected a plain tensor"),
    ],
)
def test_wrong_tensors_raise_and_are_named(fill, changes, message):
    with pytest.raises(RankError, match=message):
        run_ranks(1, fill, **changes)


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


def test_the_public_names_are_those_of_the_package():
    assert all(hasattr(dbuffer, name) for name in dbuffer.__all__)
