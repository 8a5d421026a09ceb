"""The ways in which FSDP2's tutorial loads full state dicts of models and optimizers."""

import copy

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import loss_of, seeded, shard, tokens
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import distribute_tensor

from fsdp_runtime import fully_shard, get_full_state_dict
from layout_planner import Elements
from ragged_shard.testing import on_ranks, rank_mesh

FROM_RANK0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
ON_ALL = StateDictOptions(full_state_dict=True)


def options_of(kind):
    if kind == "mixed precision":
        return {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    if kind == "hybrid":
        ranks = dist.get_world_size()
        shape = (ranks // 2, 2) if ranks % 2 == 0 else (1, ranks)
        return {"mesh": rank_mesh(*shape, names=("replicate", "shard"))}
    if kind == "elements":
        return {"block_policy": lambda name, param: Elements(3)}
    return {}


def model_of(kind, device="cpu", seed=1):
    # 5 rows of embeddings: on 3 ranks there are uneven and empty shards.
    with torch.device(device):
        model = seeded(seed=seed, vocab=5, tied=kind == "tied")
    return shard(model, **options_of(kind))


def full_values(kind):
    return seeded(vocab=5, tied=kind == "tied").state_dict()


def assert_loaded(model, kind):
    for name, value in get_full_state_dict(model).items():
        assert torch.equal(value, full_values(kind)[name]), (kind, name)
    loss_of(model, tokens(vocab=5)).backward()


def assigned(kind, device):
    model = model_of(kind, device)
    sharded = {}
    own = model.state_dict()
    for name, value in full_values(kind).items():
        placed = distribute_tensor(value, own[name].device_mesh, own[name].placements)
        sharded[name] = nn.Parameter(placed)
    model.load_state_dict(sharded, assign=True)
    assert_loaded(model, kind)


def on_all_ranks(kind, device):
    model = model_of(kind, device)
    set_model_state_dict(model, full_values(kind), options=ON_ALL)
    assert_loaded(model, kind)


def from_rank0(kind, device):
    model = model_of(kind, device)
    values = full_values(kind) if dist.get_rank() == 0 else {}
    set_model_state_dict(model, values, options=FROM_RANK0)
    assert_loaded(model, kind)


KINDS = ["plain", "mixed precision", "hybrid", "tied"]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@on_ranks("ranks")
def test_full_state_dicts_load_as_in_fsdp2s_tutorial(ranks):
    for kind in KINDS:
        for device in ("cpu", "meta"):
            assigned(kind, device)
            on_all_ranks(kind, device)
            from_rank0(kind, device)
    for device in ("cpu", "meta"):
        assigned("elements", device)
        on_all_ranks("elements", device)


class Odd(nn.Module):
    """Five rows, one element, bf16 next to fp32, and buffers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.randn(1))
        self.narrow = nn.Parameter(torch.randn(2, 2, dtype=torch.bfloat16))
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("table", torch.randn(4))

    def forward(self, x):
        return self.norm(self.linear(x)).sum() * self.scale + self.narrow.float().sum()


def odd(device="cpu", seed=0):
    torch.manual_seed(seed)
    with torch.device(device):
        return Odd()


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_a_model_on_meta_loads_uneven_rows_dtypes_and_buffers(ranks):
    expected = odd().state_dict()
    for options in (FROM_RANK0, ON_ALL):
        model = fully_shard(odd("meta"))
        values = odd().state_dict() if options is ON_ALL or dist.get_rank() == 0 else {}
        set_model_state_dict(model, values, options=options)
        for name, value in get_full_state_dict(model).items():
            assert value.dtype == expected[name].dtype
            assert torch.equal(value, expected[name]), name
        model(torch.randn(4, 3)).backward()
        torch.optim.AdamW(model.parameters()).step()
    model = fully_shard(odd("meta"))
    values = {"linear.weight": expected["linear.weight"]} if dist.get_rank() == 0 else {}
    lenient = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(model, values, options=lenient)
    assert torch.equal(model.linear.weight.full_tensor(), expected["linear.weight"])
    assert model.linear.bias.is_meta


def trained(model, optimizer, steps):
    for step in steps:
        loss_of(model, tokens(step, vocab=5, rank=0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def states_from_rank0(kind, foreach):
    plain = seeded(vocab=5, tied=kind == "tied")
    theirs = adamw(plain)
    trained(plain, theirs, range(2))
    full = get_optimizer_state_dict(plain, theirs)
    rank0 = dist.get_rank() == 0
    for together in (False, True):  # torch's set_state_dict takes an empty dict for one of an optimizer alone
        model = model_of(kind)
        ours = adamw(model, foreach=foreach)
        values, state = copy.deepcopy((plain.state_dict(), full)) if rank0 or together else ({}, {})
        if together:
            set_state_dict(model, ours, model_state_dict=values, optim_state_dict=state, options=FROM_RANK0)
        else:
            set_model_state_dict(model, values, options=FROM_RANK0)
            set_optimizer_state_dict(model, ours, state, options=FROM_RANK0)
        reference = seeded(vocab=5, tied=kind == "tied")
        reference.load_state_dict(plain.state_dict())
        twin = adamw(reference)
        twin.load_state_dict(theirs.state_dict())
        trained(model, ours, range(2, 4))
        trained(reference, twin, range(2, 4))
        for name, value in get_full_state_dict(model).items():
            torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_full_optimizer_states_of_rank_0_load_as_in_fsdp2s_tutorial(ranks):
    for kind in ("plain", "hybrid", "tied"):
        for foreach in (False, True):
            states_from_rank0(kind, foreach)


@on_ranks(2)
def test_what_torch_would_slice_or_place_wrongly_raises_on_every_rank_with_the_way_out():
    values = full_values("plain") if dist.get_rank() == 0 else {}
    for device in ("cpu", "meta"):
        with pytest.raises(NotImplementedError, match=r"whole rows.*set_full_state_dict"):
            set_model_state_dict(model_of("elements", device), dict(values), options=FROM_RANK0)
    model = model_of("plain")
    optimizer = adamw(model)
    plain = seeded(vocab=5)
    theirs = adamw(plain)
    trained(plain, theirs, range(1))
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(plain, theirs), options=ON_ALL)
    with pytest.raises(ValueError, match="broadcast_from_rank0=True"):
        trained(model, optimizer, range(1))
