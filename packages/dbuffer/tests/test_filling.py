"""Values into a buffer, and RaggedDTensors on its shard."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dbuffer_helpers import SPECS, assert_locals_equal, full_tensors, load, make, mesh_of

from dbuffer import Gather
from ragged_shard import RaggedDTensor
from ragged_shard.testing import on_ranks, record_collectives, run_ranks


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
@on_ranks("shape")
def test_ragged_tensors_are_the_shard_itself(shape):
    """An optimizer step on the ragged tensors is in the next gather, with nothing copied back."""
    buffer = make(mesh=mesh_of(*shape))
    load(buffer, full_tensors())
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
    Gather([buffer]).start().wait()
    for name, want in full_tensors().items():
        assert buffer.views[name].equal(want - 1), name
        assert tensors[name].full_tensor().equal(want - 1), name


def save(path, layout):
    tensors = load(make(layout), full_tensors()).ragged_tensors()
    dcp.save(tensors, checkpoint_id=path)


def load_checkpoint(path, layout):
    buffer = make(layout)
    dcp.load(buffer.ragged_tensors(), checkpoint_id=path)
    assert_locals_equal(buffer, full_tensors())


def load_plain(path):
    tensors = {spec.name: torch.zeros(spec.shape) for spec in SPECS}
    dcp.load(tensors, checkpoint_id=path)
    for name, value in full_tensors().items():
        assert tensors[name].equal(value)


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_loads_straight_into_the_shards_of_another_layout(tmp_path):
    run_ranks(3, save, tmp_path, "planned")
    run_ranks(2, load_checkpoint, tmp_path, "split")
    run_ranks(4, load_checkpoint, tmp_path, "planned")
    run_ranks(1, load_plain, tmp_path)
