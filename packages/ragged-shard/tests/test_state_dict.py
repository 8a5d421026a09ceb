"""Full state dicts, from rank 0 or all ranks, into and out of modules with ragged parameters."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from ragged_shard import RaggedDTensor, RaggedShard, distribute_like, distribute_tensor
from ragged_shard._torch_compat import SUBCLASSES_DTENSOR
from ragged_shard.state_dict import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives

seen_by_torch = pytest.mark.skipif(
    not SUBCLASSES_DTENSOR, reason="torch < 2.12: torch's full-state-dict helper sees no DTensor"
)


def values():
    return {
        "uneven": torch.arange(24.0).view(6, 4),
        "vector": torch.arange(12.0),
        "scalar": torch.tensor(3.0),
        "sharded": torch.arange(20.0).view(5, 4),
        "plain": torch.arange(6.0).view(2, 3).t(),  # not contiguous, as what it is loaded into
        "steps": torch.tensor([5, 6], dtype=torch.int16),
        "short": torch.arange(5, dtype=torch.int16),  # travels as bytes
    }


def model():
    mesh, module = rank_mesh(3), nn.Module()
    ragged = {
        "uneven": RaggedShard((0,), (1, 2, 3)),
        "vector": RaggedShard((0,), (0, 1, 0)),
        "scalar": RaggedShard((), (0, 0, 1)),
        "short": RaggedShard((0,), (2, 0, 3)),
    }
    for name, full in values().items():
        value = torch.zeros_like(full)
        if name == "sharded":
            value = torch_distribute_tensor(value, mesh, [Shard(0)])
        elif name in ragged:
            value = distribute_tensor(value, mesh, [ragged[name]])
        if name in ("steps", "short"):
            module.register_buffer(name, value)
        else:
            setattr(module, name, nn.Parameter(value))
    return module


@on_ranks(3)
def test_gathering_to_rank_0_sends_each_byte_once():
    module: Any = nn.Module()
    mesh = rank_mesh(3)
    module.w = nn.Parameter(
        distribute_tensor(torch.arange(24.0).view(6, 4), mesh, [RaggedShard((0,), (1, 2, 3))])
    )
    with record_collectives() as record:
        full_state_dict(module, rank0_only=True)
    assert record.kinds == ["all_to_all"]
    assert record.bytes_sent == (0 if dist.get_rank() == 0 else module.w.to_local().numel() * 4)


PLACEMENTS: dict[str, list] = {
    "uneven": [RaggedShard((0,), (1, 2, 3))],
    "one holder": [RaggedShard((0,), (0, 1, 0))],
    "elements": [RaggedShard((0, 1), (5, 1, 6))],
    "hsdp": [Replicate(), RaggedShard((0,), (3, 3, 0))],
}
OF_WEIGHT = {"first": torch.ones(2), "weight": torch.arange(24.0).view(6, 4)}


def of_weight(name, device="cpu"):
    placements = PLACEMENTS[name]
    mesh = rank_mesh(*((3,) if len(placements) == 1 else (1, 3)))
    module: Any = nn.Module()
    module.first = nn.Parameter(torch.zeros(2))
    module.weight = nn.Parameter(distribute_tensor(torch.zeros(6, 4), mesh, placements).to(device))
    return module


def options_from(rank0, cpu_offload=False):
    return StateDictOptions(full_state_dict=True, broadcast_from_rank0=rank0, cpu_offload=cpu_offload)


def given(full):
    """Tensors that rank 0 alone has."""
    return dict(full) if dist.get_rank() == 0 else {}


def states_of_weight():
    plain = nn.Module()
    for name, value in OF_WEIGHT.items():
        setattr(plain, name, nn.Parameter(value))
        getattr(plain, name).grad = value + 1
    optimizer = torch.optim.AdamW(plain.parameters())
    optimizer.step()
    return get_optimizer_state_dict(plain, optimizer)


@seen_by_torch
@on_ranks(3)
def test_torchs_functions_that_slice_full_tensors_give_right_values():
    for name in PLACEMENTS:
        for device in ("cpu", "meta"):
            weight = of_weight(name, device).weight
            placed = torch_distribute_tensor(OF_WEIGHT["weight"], weight.device_mesh, weight.placements)
            assert placed.placements == (*PLACEMENTS[name][:-1], Shard(0))
            assert torch.equal(placed.full_tensor(), OF_WEIGHT["weight"])
        module = of_weight(name, "meta")
        set_model_state_dict(module, dict(OF_WEIGHT), options=options_from(False))
        assert torch.equal(module.weight.full_tensor(), OF_WEIGHT["weight"])
        if name == "elements":
            continue
        for cpu_offload in (False, True):
            module, options = of_weight(name), options_from(True, cpu_offload)
            set_model_state_dict(module, given(OF_WEIGHT), options=options)
            assert torch.equal(module.weight.full_tensor(), OF_WEIGHT["weight"])
            optimizer, full = torch.optim.AdamW(module.parameters()), states_of_weight()
            set_optimizer_state_dict(module, optimizer, given(full), options=options)
            for key, value in full_optimizer_state_dict(module, optimizer)["state"]["weight"].items():
                assert torch.equal(value, full["state"]["weight"][key])


def torch_refuses(kind, name):
    """Every rank must raise, also one that holds all of a tensor."""
    module, options = of_weight(name, "meta" if kind == "meta" else "cpu"), options_from(True)
    if kind == "plain":
        weight = module.weight.detach()
        type(weight).__base__.from_local(weight.to_local(), weight.device_mesh, weight.placements)
    elif kind == "optimizer":
        optimizer = torch.optim.AdamW(module.parameters())
        set_optimizer_state_dict(module, optimizer, given(states_of_weight()), options=options)
    else:
        set_model_state_dict(module, given(OF_WEIGHT), options=options)


@seen_by_torch
@on_ranks(3)
def test_a_module_on_meta_is_loaded_from_rank_0_by_what_the_error_names():
    for name in ("uneven", "one holder", "hsdp"):
        module = of_weight(name, "meta")
        before = module.weight.placements
        with pytest.raises(
            RuntimeError, match=r'"weight".*Call to_empty\(device=\.\.\.\).*set_model_state_dict'
        ):
            set_model_state_dict(module, given(OF_WEIGHT), options=options_from(True))
        module.to_empty(device="cpu")
        set_model_state_dict(module, given(OF_WEIGHT), options=options_from(True))
        assert torch.equal(module.weight.full_tensor(), OF_WEIGHT["weight"])
        assert module.weight.placements == before


@seen_by_torch
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("plain", ["uneven", "one holder", "elements", "hsdp"]),
        ("model", ["elements"]),
        ("meta", ["uneven", "one holder", "elements", "hsdp"]),
        ("optimizer", ["elements"]),
    ],
)
@on_ranks(3)
def test_torch_slicing_wrongly_raises_on_every_rank_and_names_what_to_use(kind, names):
    for name in names:
        # On meta the module raises, while it loads: load_state_dict collects errors in one RuntimeError.
        with pytest.raises(RuntimeError if kind == "meta" else NotImplementedError) as caught:
            torch_refuses(kind, name)
        for words in (
            str(PLACEMENTS[name][-1]), "ragged_shard.distribute_tensor", "load_full_state_dict",
            "load_full_optimizer_state_dict",
        ):  # fmt: skip
            assert words in str(caught.value), name


@on_ranks(4)
def test_a_mesh_without_rank_0_loads_and_gathers():
    mesh = rank_mesh(2, 2, names=("replicate", "shard"))["shard"]
    module = nn.Module()
    module.w = nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [RaggedShard((0,), (1, 3))]))
    load_full_state_dict(module, {"w": torch.ones(4, 2)})
    assert torch.equal(full_state_dict(module)["w"], torch.ones(4, 2))
    gathered = full_state_dict(module, rank0_only=True)
    assert list(gathered) == (["w"] if dist.get_rank() == 0 else [])


def trained(module, make):
    """An optimizer after two steps with gradients that do not depend on how parameters are distributed."""
    optimizers = make(module)
    for step in range(2):
        for name, param in module.named_parameters():
            gradient = (values()[name] - 4) / (3 + step)
            param.grad = distribute_like(gradient, param.detach(), src_data_rank=None)
        for optimizer in optimizers:
            optimizer.step()
    return optimizers


def adamw(module):
    return [torch.optim.AdamW(module.parameters(), lr=0.1, amsgrad=True)]


def two_optimizers(module):
    first, *rest = module.parameters()
    groups = [{"params": rest[:2], "lr": 0.3}, {"params": rest[2:]}]
    return [torch.optim.AdamW([first], lr=0.2), torch.optim.SGD(groups, lr=0.1, momentum=0.9)]


def compare(found, wanted):
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    for name, state in wanted["state"].items():
        assert found["state"][name].keys() == state.keys()
        for key, value in state.items():
            assert type(found["state"][name][key]) is type(value)
            assert torch.equal(found["state"][name][key], value), (name, key)


@on_ranks(4)
def test_rank_0_loads_what_fsdp2_and_tensor_parallelism_cut_into_unequal_shares():
    module: Any = nn.Module()
    full = torch.arange(12.0).view(6, 2)
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    module.w = nn.Parameter(
        torch_distribute_tensor(full * 0, rank_mesh(2, 2), placements, src_data_rank=None)
    )
    load_full_state_dict(module, {"w": full} if dist.get_rank() == 0 else {}, rank0_only=True)
    assert (
        module.w.to_local().tolist() == [full[:2], full[3:5], full[2:3], full[5:]][dist.get_rank()].tolist()
    )


@on_ranks(3)
def test_every_rank_takes_its_range_of_a_full_optimizer_state_without_communication():
    module = model()
    load_full_state_dict(module, values())
    optimizers = trained(module, adamw)
    full = full_optimizer_state_dict(module, optimizers)
    addresses = [value.data_ptr() for value in optimizers[0].state[module.uneven].values()]
    with record_collectives() as record:
        load_full_optimizer_state_dict(module, optimizers, full)
    assert record.events == []
    assert [value.data_ptr() for value in optimizers[0].state[module.uneven].values()] == addresses
    assert all(
        isinstance(optimizers[0].state[module.uneven][key], RaggedDTensor)
        for key in ("exp_avg", "exp_avg_sq")
    )


@pytest.mark.parametrize(("rank0_only", "fresh"), [(True, True), (False, True), (True, False)])
@on_ranks(3)
def test_frozen_parameters_get_the_states_that_a_full_state_dict_has(rank0_only, fresh):
    module = model()
    load_full_state_dict(module, values())
    optimizers = trained(module, two_optimizers)
    module.uneven.requires_grad_(False)
    full = full_optimizer_state_dict(module, optimizers)
    given_state = full if not rank0_only or dist.get_rank() == 0 else {}
    for state in optimizers[0].state.values():
        state["exp_avg"].zero_()
    optimizers = two_optimizers(module) if fresh else optimizers
    gradients = {name: param.grad for name, param in module.named_parameters()}
    weights = full_state_dict(module)
    load_full_optimizer_state_dict(module, optimizers, given_state, rank0_only=rank0_only)
    compare(full_optimizer_state_dict(module, optimizers), full)
    for name, value in full_state_dict(module).items():
        assert torch.equal(value, weights[name])
    assert all(param.grad is gradients[name] for name, param in module.named_parameters())


@on_ranks(3)
def test_states_of_frozen_parameters_that_do_not_fit_leave_the_optimizer_alone():
    module = model()
    full = full_optimizer_state_dict(module, trained(module, adamw))
    full["state"]["uneven"]["exp_avg"] = torch.zeros(4, 6)
    module.uneven.requires_grad_(False)
    optimizers = trained(module, adamw)
    optimizers[0].state.pop(module.uneven)
    with pytest.raises(ValueError, match=r"uneven.exp_avg: expected shape \(6, 4\), got \(4, 6\)"):
        load_full_optimizer_state_dict(module, optimizers, full)
    assert module.uneven not in optimizers[0].state
