"""Making, wrapping, copying and pickling ragged tensors; and what is refused."""

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from ragged_shard import RaggedDTensor, RaggedShard, distribute_like, distribute_tensor
from ragged_shard._torch_compat import SUBCLASSES_DTENSOR
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives


def make(requires_grad=False):
    full = torch.arange(24.0).view(8, 3).requires_grad_(requires_grad)
    return full, distribute_tensor(full, rank_mesh(3), [RaggedShard((0,), (3, 0, 1))])


@on_ranks(3)
def test_each_rank_holds_its_run_of_rows():
    full, tensor = make()
    assert torch.equal(tensor.to_local(), (full[:6], full[6:6], full[6:])[dist.get_rank()])
    assert tensor.shape == (8, 3)
    assert tensor.is_contiguous()
    assert isinstance(tensor, DTensor) == SUBCLASSES_DTENSOR
    assert torch.equal(tensor.full_tensor(), full)
    assert "RaggedShard" in repr(tensor)


@on_ranks(3)
def test_the_source_ranks_data_count_or_each_ranks_own():
    mine = torch.full((6, 2), float(dist.get_rank()))
    for source, expected in ((0, [0.0] * 6), (2, [2.0] * 6), (None, [0.0, 1.0, 1.0, 2.0, 2.0, 2.0])):
        tensor = distribute_tensor(mine, rank_mesh(3), [RaggedShard((0,), (1, 2, 3))], src_data_rank=source)
        assert tensor.full_tensor()[:, 0].tolist() == expected


@on_ranks(3)
def test_distribute_tensor_sends_each_part_once():
    mesh = rank_mesh(3)
    full = torch.arange(12.0).view(6, 2)
    with record_collectives() as record:
        distribute_tensor(full, mesh, [RaggedShard((0,), (1, 2, 3))])
    assert record.kinds == ["all_reduce", "all_to_all"]
    assert record.events[1].bytes_sent == (10 * 4 if dist.get_rank() == 0 else 0)
    with record_collectives() as record:
        distribute_tensor(full, mesh, [RaggedShard((0,), (1, 2, 3))], src_data_rank=None)
    assert record.kinds == []


@on_ranks(3)
def test_from_local_aliases_the_storage_and_communicates_nothing():
    mesh = rank_mesh(3)
    flat = torch.arange(10.0)
    part = flat[2 : 2 + 3 * (dist.get_rank() + 1)].view(-1, 3) if dist.get_rank() < 2 else torch.zeros(0, 3)
    with record_collectives() as record:
        tensor = RaggedDTensor.from_local(
            part, mesh, [RaggedShard((0,), (1, 2, 0))], shape=(3, 3), stride=(3, 1)
        )
        tensor.add_(1)
    assert record.kinds == []
    assert tensor.to_local().data_ptr() == part.data_ptr()
    with torch.no_grad():
        assert tensor.to_local() is part
    if dist.get_rank() == 0:
        assert flat.tolist() == [0, 1, 3, 4, 5, 5, 6, 7, 8, 9]


@on_ranks(2)
def test_distribute_like_follows_any_kind_of_tensor():
    mesh = rank_mesh(2)
    full = torch.arange(12.0).view(4, 3)
    ragged = distribute_tensor(full, mesh, [RaggedShard((0,), (1, 3))])
    again: Any = distribute_like(full * 2, ragged)
    assert torch.equal(again.to_local(), ragged.to_local() * 2)
    theirs = torch_distribute_tensor(full, mesh, [Shard(0)])
    again = distribute_like(full, theirs)
    assert torch.equal(again.to_local(), theirs.to_local())
    assert distribute_like(full, full) is full


@on_ranks(3)
def test_deepcopy_gives_a_tensor_of_its_own_with_the_same_placements():
    full, tensor = make(requires_grad=True)
    param: Any = nn.Parameter(tensor)
    param.grad = torch.ones_like(param)
    twin: Any = copy.deepcopy(param)
    assert all(isinstance(one, nn.Parameter) for one in (param, twin))
    assert isinstance(twin, RaggedDTensor)
    assert twin.requires_grad
    assert torch.equal(twin.grad.full_tensor(), torch.ones_like(full))
    with torch.no_grad():
        twin.add_(1)
    assert torch.equal(param.full_tensor(), full)
    assert torch.equal(twin.full_tensor(), full + 1)
    tied = copy.deepcopy([param, param])
    assert tied[0] is tied[1]


@on_ranks(3)
def test_torch_save_and_pickle_bring_a_tensor_back():
    full, tensor = make()
    buffer = io.BytesIO()
    torch.save({"w": tensor, "p": nn.Parameter(tensor)}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)
    loaded["plain pickle"] = pickle.loads(pickle.dumps(tensor))
    for name, found in loaded.items():
        assert isinstance(found, RaggedDTensor), name
        assert found.placements == tensor.placements
        assert torch.equal(found.full_tensor(), full), name
    assert isinstance(loaded["p"], nn.Parameter)
    assert loaded["p"].requires_grad


@on_ranks(3)
def test_modules_with_ragged_parameters_cast_load_and_freeze():
    _, tensor = make()
    module: Any = nn.Module()
    module.weight = nn.Parameter(tensor)
    module.to(torch.bfloat16)
    assert module.weight.dtype == module.weight.to_local().dtype == torch.bfloat16
    assert module.weight.placements == tensor.placements
    module.double()
    assert module.weight.to_local().dtype == torch.float64
    assert torch.equal(module.weight.full_tensor(), torch.arange(24.0, dtype=torch.float64).view(8, 3))
    module.load_state_dict({"weight": tensor * 2})
    assert torch.equal(module.weight.full_tensor(), torch.arange(24.0).view(8, 3).double() * 2)
    module.zero_grad()
    module.requires_grad_(False)
    assert not module.weight.requires_grad


@on_ranks(3)
def test_meta_tensors_are_laid_out_and_given_storage_later():
    mesh = rank_mesh(3)
    param: Any = nn.Parameter(
        distribute_tensor(torch.empty(6, 2, device="meta"), mesh, [RaggedShard((0,), (1, 2, 3))])
    )
    assert param.is_meta
    assert param.to_local().shape == (2 * 0 + dist.get_rank() + 1, 2)
    module: Any = nn.Module()
    module.weight = param
    module.to_empty(device="cpu")
    assert not module.weight.to_local().is_meta
    assert module.weight.placements == param.placements


@on_ranks(4)
def test_hsdp_placements_are_made_from_a_full_tensor():
    mesh = rank_mesh(2, 2)
    full = torch.arange(8.0).view(4, 2)
    for op in ("sum", "avg"):
        tensor = distribute_tensor(full, mesh, [Partial(op), RaggedShard((0,), (1, 3))])
        assert torch.equal(tensor.full_tensor(), full)
    tensor = distribute_tensor(full, mesh, [Replicate(), RaggedShard((0,), (1, 3))])
    assert torch.equal(tensor.to_local(), full[:1] if dist.get_rank() % 2 == 0 else full[1:])


@on_ranks(3)
def test_data_can_be_written_and_replaced():
    full, tensor = make(requires_grad=True)
    param: Any = nn.Parameter(tensor)
    assert isinstance(param.data, RaggedDTensor)
    assert param.data.to_local().data_ptr() == param.to_local().data_ptr()
    param.data.mul_(2)
    assert torch.equal(param.full_tensor(), full * 2)
    param.data = tensor.detach().to(torch.float64).redistribute(placements=[RaggedShard((0,), (1, 2, 1))])
    assert param.dtype == param.to_local().dtype == torch.float64
    assert param.placements == (RaggedShard((0,), (1, 2, 1)),)
    assert torch.equal(param.full_tensor(), full.double() * 2)


@on_ranks(4)
def test_a_mesh_that_permutes_ranks_may_be_cut_along_the_axis_in_order():
    """Process groups go by ascending ranks, whatever the mesh says."""
    ragged, full = RaggedShard((0,), (1, 1)), torch.arange(4.0)
    for ranks, placements in (
        ([[1, 0], [2, 3]], [ragged, Replicate()]),
        ([[2, 3], [0, 1]], [Replicate(), ragged]),
    ):
        mesh = DeviceMesh("cpu", ranks)
        assert distribute_tensor(full, mesh, placements, src_data_rank=None).full_tensor().equal(full)


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason="torch sorts the ranks of every group",
)
@on_ranks(2)
def test_a_mesh_of_a_group_in_an_order_of_its_own_keeps_it():
    group = dist.new_group([1, 0], sort_ranks=False)
    mesh = DeviceMesh.from_group(group, "cpu")
    full = torch.arange(4.0)
    assert distribute_tensor(full, mesh, [RaggedShard((0,), (1, 3))]).full_tensor().equal(full)
