"""Full state dicts, from rank 0 or all ranks, into and out of modules with ragged parameters."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from ragged_shard import (
    RaggedShard,
    StridedRaggedShard,
    distribute_tensor,
    full_state_dict,
    load_full_state_dict,
)
from ragged_shard._torch_compat import SUBCLASSES_DTENSOR
from ragged_shard.testing import record_collectives, run_ranks


def values():
    return {
        "uneven": torch.arange(24.0).view(6, 4),
        "vector": torch.arange(12.0),
        "scalar": torch.tensor(3.0),
        "sharded": torch.arange(20.0).view(5, 4),
        "plain": torch.arange(3.0),
        "steps": torch.tensor([5, 6]),
    }


def model(two_d=False, device="cpu"):
    blank = {name: torch.zeros_like(value, device=device) for name, value in values().items()}
    mesh = init_device_mesh("cpu", (2, 2) if two_d else (3,))
    u = {
        "uneven": [StridedRaggedShard((0,), (1, 2), 2), Shard(0)]
        if two_d
        else [RaggedShard((0,), (1, 2, 3))],
        "vector": [Replicate(), RaggedShard((0,), (1, 3))] if two_d else [RaggedShard((0,), (0, 1, 0))],
        "scalar": [Replicate(), RaggedShard((), (1, 0))] if two_d else [RaggedShard((), (0, 0, 1))],
        "sharded": [Replicate(), Shard(0)] if two_d else [Shard(0)],
    }
    module = nn.Module()
    for name, value in blank.items():
        if name == "sharded":
            value = torch_distribute_tensor(value, mesh, u[name])
        elif name in u:
            value = distribute_tensor(value, mesh, u[name])
        if name == "steps":
            module.register_buffer(name, value)
        else:
            setattr(module, name, nn.Parameter(value))
    return module


def round_trip(two_d, rank0_only):
    module = model(two_d)
    here = not rank0_only or dist.get_rank() == 0
    with record_collectives() as record:
        load_full_state_dict(module, values() if here else {}, rank0_only=rank0_only)
    assert bool(record.kinds) == rank0_only
    gathered = full_state_dict(module, rank0_only=rank0_only)
    assert list(gathered) == (list(values()) if here else [])
    everywhere = full_state_dict(module, cpu_offload=True)
    for name, value in values().items():
        assert torch.equal(everywhere[name], value), name
        assert type(everywhere[name]) is torch.Tensor
        if here:
            assert torch.equal(gathered[name], value), name
    everywhere["uneven"].zero_()
    assert torch.equal(module.uneven.full_tensor(), values()["uneven"])


@pytest.mark.parametrize("rank0_only", [True, False])
@pytest.mark.parametrize("two_d", [True, False])
def test_a_full_state_dict_loads_and_gathers_bit_by_bit(two_d, rank0_only):
    run_ranks(4 if two_d else 3, round_trip, two_d, rank0_only)


def gather_to_one_bytes():
    module = nn.Module()
    mesh = init_device_mesh("cpu", (3,))
    module.w = nn.Parameter(
        distribute_tensor(torch.arange(24.0).view(6, 4), mesh, [RaggedShard((0,), (1, 2, 3))])
    )
    with record_collectives() as record:
        full_state_dict(module, rank0_only=True)
    assert record.kinds == ["all_to_all"]
    assert record.bytes_sent == (0 if dist.get_rank() == 0 else module.w.to_local().numel() * 4)


def test_gathering_to_rank_0_sends_each_byte_once():
    run_ranks(3, gather_to_one_bytes)


def bad(kind, rank0_only):
    module = model(device="meta" if kind == "meta" else "cpu")
    given = values()
    if kind == "shape":
        given["uneven"] = torch.zeros(4, 6)
    elif kind == "missing":
        del given["vector"]
    elif kind == "unexpected":
        given["other"] = torch.zeros(1)
    elif kind == "type":
        given["vector"] = 3
    if rank0_only and dist.get_rank() != 0:
        given = {}
    with pytest.raises((ValueError, TypeError)) as caught:
        load_full_state_dict(module, given, rank0_only=rank0_only)
    if kind != "meta":
        assert all(not value.any() for value in full_state_dict(module).values())
    else:
        with pytest.raises(ValueError, match="meta device"):
            full_state_dict(module)
    return str(caught.value)


@pytest.mark.parametrize("rank0_only", [True, False])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("shape", "uneven: a tensor of shape (4, 6) for one of shape (6, 4)"),
        ("missing", "missing names ['vector']"),
        ("unexpected", "unexpected names ['other']"),
        ("type", "vector: expected a whole plain tensor"),
        ("meta", "are on the meta device; give them storage first"),
    ],
)
def test_a_state_dict_that_does_not_fit_raises_on_every_rank_before_anything_is_written(
    kind, message, rank0_only
):
    assert all(message in text for text in run_ranks(3, bad, kind, rank0_only, timeout=20))


def meta_on_one_rank():
    module = nn.Module()
    device = "meta" if dist.get_rank() == 1 else "cpu"
    mesh = init_device_mesh("cpu", (3,))
    part = torch.zeros(2, 2, device=device)
    from ragged_shard import RaggedDTensor

    module.w = nn.Parameter(
        RaggedDTensor.from_local(part, mesh, [RaggedShard((0,), (1, 1, 1))], shape=(6, 2))
    )
    with pytest.raises(ValueError, match="meta device"):
        load_full_state_dict(module, {"w": torch.zeros(6, 2)}, rank0_only=True)


def test_a_meta_parameter_on_one_rank_raises_on_all():
    run_ranks(3, meta_on_one_rank, timeout=20)


def not_strict():
    module = model()
    load_full_state_dict(module, {"vector": values()["vector"], "other": torch.zeros(1)}, strict=False)
    assert torch.equal(module.vector.full_tensor(), values()["vector"])
    assert not module.uneven.full_tensor().any()


def test_without_strict_the_common_names_are_loaded():
    run_ranks(3, not_strict)


def torch_gathers():
    module = model()
    load_full_state_dict(module, values())
    options = StateDictOptions(full_state_dict=True)
    gathered = get_model_state_dict(module, options=options)
    for name, value in values().items():
        assert torch.equal(gathered[name], value), name


@pytest.mark.skipif(
    not SUBCLASSES_DTENSOR, reason="torch < 2.12: torch's full-state-dict helper sees no DTensor"
)
def test_torchs_own_gathering_of_full_state_dicts_works_too():
    run_ranks(3, torch_gathers)


def torch_loads(device, from_rank0):
    module = nn.Module()
    mesh = init_device_mesh("cpu", (3,))
    blank = torch.empty(6, 4, device=device)
    module.weight = nn.Parameter(distribute_tensor(blank, mesh, [RaggedShard((0,), (1, 2, 3))]))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank0)
    given = {"weight": torch.arange(24.0).view(6, 4)} if not from_rank0 or dist.get_rank() == 0 else {}
    with pytest.raises((RuntimeError, NotImplementedError)):
        set_model_state_dict(module, given, options=options)


@pytest.mark.skipif(
    not SUBCLASSES_DTENSOR, reason="torch < 2.12: torch's full-state-dict helper sees no DTensor"
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("from_rank0", [True, False])
def test_torchs_own_loading_of_full_state_dicts_raises_instead_of_mis_sizing(device, from_rank0):
    run_ranks(3, torch_loads, device, from_rank0)


def off_root():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))["shard"]
    module = nn.Module()
    module.w = nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [RaggedShard((0,), (1, 3))]))
    with pytest.raises(ValueError, match="does not begin at rank 0"):
        load_full_state_dict(module, {"w": torch.ones(4, 2)}, rank0_only=True)
    load_full_state_dict(module, {"w": torch.ones(4, 2)})
    assert torch.equal(full_state_dict(module)["w"], torch.ones(4, 2))
    gathered = full_state_dict(module, rank0_only=True)
    assert list(gathered) == (["w"] if dist.get_rank() == 0 else [])


def test_from_rank_0_onto_a_mesh_without_rank_0_raises_on_every_rank():
    run_ranks(4, off_root, timeout=20)
