"""Making, wrapping, copying and pickling ragged tensors; and what is refused."""

import copy
import inspect
import io
import pickle
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
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
def test_metadata_are_computed_once_for_a_placement_and_shape():
    mesh = rank_mesh(2)
    parts = [torch.zeros(2 * (1 + 2 * dist.get_rank()), 3) for _ in range(2)]
    a, b = (RaggedDTensor.from_local(p, mesh, [RaggedShard((0,), (1, 3))], shape=(8, 3)) for p in parts)
    assert a._sharding is b._sharding
    assert a._spec is b._spec
    with mock.patch("ragged_shard._sharding.Sharding", side_effect=AssertionError("computed again")):
        RaggedDTensor.from_local(parts[0], mesh, [RaggedShard((0,), (1, 3))], shape=(8, 3))


@on_ranks(3)
def test_0d_tensors_and_tensors_without_elements_work_like_any():
    mesh = rank_mesh(3)
    for shape, dims in (
        ((0,), (0,)),
        ((0, 4), (0,)),
        ((3, 0), (0,)),
        ((3, 0), (0, 1)),
        ((), ()),
        ((2, 2), ()),
    ):
        units = (0, 1, 0) if not dims else (1, 1, 1)
        full = torch.ones(shape)
        tensor: Any = distribute_tensor(full, mesh, [RaggedShard(dims, units)])
        for _ in range(2):
            assert torch.equal(tensor.full_tensor(), full)
            tensor = tensor.redistribute(placements=[Replicate()]).redistribute(placements=tensor.placements)
        assert (tensor + 1).sum().item() == 2 * full.numel()
        assert torch.linalg.vector_norm(tensor).item() == pytest.approx(full.numel() ** 0.5)
    assert tensor.to_local().shape == ((1, 2, 2) if dist.get_rank() == 1 else (0, 2, 2))


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
    with pytest.raises(ValueError, match=r"shape \(3,\) like one of \(4, 3\)"):
        distribute_like(torch.zeros(3), ragged)


@on_ranks(2)
def test_bad_arguments_raise_with_what_was_found_and_expected():
    mesh = rank_mesh(2)
    halves = [RaggedShard((0,), (1, 1))]
    good = torch.zeros(2, 3)
    cases: list = [
        (
            {"local": torch.zeros(3, 3)},
            ValueError,
            r"shape \(3, 3\), but .* a local tensor of shape \(2, 3\)",
        ),
        ({"local": torch.zeros(6)}, ValueError, r"a local tensor of shape \(2, 3\)"),
        ({"local": torch.zeros(3, 2).t()}, ValueError, "not contiguous; pass"),
        ({"stride": (1, 4)}, ValueError, r"not contiguous for shape \(4, 3\)"),
        ({"stride": (1,)}, ValueError, "for a 2-d shape"),
        ({"device_mesh": "cpu"}, TypeError, "expected a DeviceMesh"),
        ({"shape": (5, 3)}, ValueError, "not divisible"),
        ({"placements": halves * 2}, ValueError, "expected 1 placements"),
        ({"local": DTensor.from_local(good, mesh, [Replicate()])}, TypeError, "plain tensor"),
    ]
    for change, error, message in cases:
        arguments = {"local": good, "device_mesh": mesh, "placements": halves, "shape": (4, 3)} | change
        with pytest.raises(error, match=message):
            RaggedDTensor.from_local(**arguments)
    with pytest.raises(TypeError):
        RaggedDTensor(good)
    with pytest.raises(TypeError, match="use redistribute"):
        distribute_tensor(DTensor.from_local(good, mesh, [Replicate()]), mesh, halves)
    with pytest.raises(ValueError, match="no ragged placement"):
        distribute_tensor(good, mesh, [Shard(0)])
    with pytest.raises(ValueError, match="src_data_rank=5"):
        distribute_tensor(good, mesh, halves, src_data_rank=5)


def make_wrongly(which, odd):
    """Make a tensor of which one rank, the odd one, is told something else."""
    mesh = rank_mesh(3)
    rows = (1, 1, 2)[dist.get_rank()]
    ragged = [RaggedShard((0,), (1, 1, 2))]
    if which == "local shape":
        local = torch.zeros(5 if odd else rows, 3)
        return RaggedDTensor.from_local(local, mesh, ragged, shape=(4, 3), check=True)
    if which == "dtype":
        local = torch.zeros(rows, 3, dtype=torch.float64 if odd else torch.float32)
        return RaggedDTensor.from_local(local, mesh, ragged, shape=(4, 3), check=True)
    if which == "units":
        ragged = [RaggedShard((0,), (2, 1, 1) if odd else (1, 1, 2))]
    elif which == "shares that do not divide":
        ragged = [RaggedShard((0,), (2, 1, 2) if odd else (1, 1, 2))]
    return distribute_tensor(torch.zeros(5 if odd and which == "full shape" else 4, 3), mesh, ragged)


@on_ranks(3)
def test_what_is_wrong_on_one_rank_only_raises_on_every_rank():
    for which in ("local shape", "dtype", "units", "shares that do not divide", "full shape"):
        with pytest.raises((ValueError, TypeError)):
            pytest.fail(f"{which}: {make_wrongly(which, dist.get_rank() == 1)}")


@on_ranks(4)
def test_tensors_of_different_meshes_do_not_mix():
    everyone = rank_mesh(4)
    half = rank_mesh(2, 2, names=("a", "b"))["b"]
    tensor = distribute_tensor(torch.arange(8.0), half, [RaggedShard((0,), (1, 3))])
    other = distribute_tensor(torch.arange(8.0), everyone, [RaggedShard((0,), (1, 1, 1, 1))])
    assert torch.equal(tensor.full_tensor(), torch.arange(8.0))
    with pytest.raises(ValueError, match="different shardings"):
        tensor + other


@on_ranks(3)
def test_a_rank_outside_of_the_mesh_cannot_hold_a_part():
    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() == 2:
        with pytest.raises(ValueError, match="this rank is not in"):
            RaggedDTensor.from_local(torch.zeros(2), mesh, [RaggedShard((0,), (1, 1))], shape=(4,))
    else:
        RaggedDTensor.from_local(torch.zeros(2), mesh, [RaggedShard((0,), (1, 1))], shape=(4,))


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
    for name, found in (
        ("w", loaded["w"]),
        ("p", loaded["p"]),
        ("plain pickle", pickle.loads(pickle.dumps(tensor))),
    ):
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
    with pytest.raises(TypeError, match="can only be another ragged tensor"):
        param.data = full


@on_ranks(3)
def test_data_ptr_is_the_address_of_the_local_tensor():
    mesh = rank_mesh(3)
    buffer = torch.zeros(40)
    rows = [(2, 5), (0, 5), (1, 5)][dist.get_rank()]
    local = buffer[3 : 3 + rows[0] * 5].view(rows)
    tensor = RaggedDTensor.from_local(local, mesh, [RaggedShard((0,), (2, 0, 1))], shape=(3, 5))
    wanted = 0 if dist.get_rank() == 1 else buffer.data_ptr() + 3 * 4
    assert tensor.data_ptr() == tensor.to_local().data_ptr() == wanted
    assert torch.nn.Parameter(tensor).data_ptr() == tensor.detach().data_ptr() == wanted
    if rows[0]:
        assert tensor.clone().data_ptr() not in (0, wanted)


@on_ranks(4)
def test_a_mesh_that_permutes_ranks_of_a_group_is_refused_on_every_rank():
    """Process groups go by ascending ranks, whatever the mesh says."""
    ragged, full = RaggedShard((0,), (1, 1)), torch.arange(4.0)
    for ranks, cut, wrong in (
        ([[1, 0], [2, 3]], 1, [1, 0]),  # an axis of ranks 0 and 1, and all ranks hear of it
        ([[2, 3], [0, 1]], 0, [2, 0]),
    ):
        mesh = DeviceMesh("cpu", ranks)
        placements: list[Placement] = [Replicate(), Replicate()]
        placements[cut] = ragged
        with pytest.raises(
            ValueError, match=re.escape(f"ranks {wrong} of mesh(cpu (2, 2)) are not in the order")
        ):
            distribute_tensor(full, mesh, placements, src_data_rank=None)
        placements = [ragged, ragged]
        placements[cut] = Replicate()
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
