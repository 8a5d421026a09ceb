"""Full state dicts and writes outside of training reach the shards."""

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import (
    BF16,
    assert_same_values,
    loss_of,
    mesh_of,
    on_meta,
    seeded,
    shard,
    step_of,
    tokens,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import distribute_tensor

from fsdp_runtime import (
    QuantizationPolicy,
    full_params,
    fully_shard,
    get_full_state_dict,
    offload,
    set_full_state_dict,
)
from fsdp_runtime.block_policies import whole
from fsdp_runtime.checkpoint import get_full_optimizer_state_dict
from fsdp_runtime.integrations.accelerate import full_state_dicts
from fsdp_runtime.quantization import BlockFP8, BlockInt8
from ragged_shard._torch_compat import SUBCLASSES_DTENSOR
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives

FROM_RANK0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
ON_ALL = StateDictOptions(full_state_dict=True)


class Odd(nn.Module):
    """Five rows, which are tied, one element, bf16 next to fp32, and buffers."""

    def __init__(self):
        super().__init__()
        self.linear, self.tied = nn.Linear(3, 5), nn.Linear(3, 5, bias=False)
        self.tied.weight = self.linear.weight
        self.scale = nn.Parameter(torch.randn(1))
        self.narrow = nn.Parameter(torch.randn(2, 2, dtype=torch.bfloat16))
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("table", torch.randn(4))

    def forward(self, x):
        return self.norm(self.linear(x) + self.tied(x)).sum() * self.scale + self.narrow.float().sum()


def odd(device="cpu", seed=0):
    torch.manual_seed(seed)
    with torch.device(device):
        return Odd()


@on_ranks(3)
def test_a_model_on_meta_loads_uneven_rows_dtypes_and_buffers():
    expected = odd().state_dict()
    for options in (FROM_RANK0, ON_ALL):
        model = fully_shard(odd("meta"))
        given = odd().state_dict() if options is ON_ALL or dist.get_rank() == 0 else {}
        set_model_state_dict(model, given, options=options)
        assert_same_values(get_full_state_dict(model), expected)
        model(torch.randn(4, 3)).backward()
        torch.optim.AdamW(model.parameters()).step()
    model = fully_shard(odd("meta"))
    values = {"linear.weight": expected["linear.weight"]} if dist.get_rank() == 0 else {}
    lenient = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(model, values, options=lenient)
    assert torch.equal(model.linear.weight.full_tensor(), expected["linear.weight"])
    assert model.linear.bias.is_meta


@pytest.mark.skipif(not SUBCLASSES_DTENSOR, reason="torch < 2.12: torch's helper sees no DTensor")
@on_ranks(1)  # of several, the others wait in torch's broadcast for rank 0, which has raised
def test_a_sharded_state_dict_that_torch_broadcasts_raises_with_the_ways_out():
    model, wanted = shard(seeded()), seeded().state_dict()
    optimizer = torch.optim.AdamW(model.parameters())
    step_of(model, optimizer)
    model.load_state_dict(wanted)
    with pytest.raises(NotImplementedError, match="get_full_state_dict"):
        set_model_state_dict(model, model.state_dict(), options=FROM_RANK0)
    states = get_optimizer_state_dict(model, optimizer)
    with pytest.raises(NotImplementedError, match="get_full_optimizer_state_dict"):
        set_optimizer_state_dict(model, optimizer, states, options=FROM_RANK0)
    full: dict[str, Any] = get_full_state_dict(model)
    set_model_state_dict(model, full, options=FROM_RANK0)
    set_model_state_dict(model, model.state_dict())
    full = get_full_optimizer_state_dict(model, optimizer)
    set_optimizer_state_dict(model, optimizer, full, options=FROM_RANK0)
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
    assert_same_values(get_full_state_dict(model), wanted)


@on_ranks(3)
def test_what_is_written_goes_into_the_shards_without_rounding():
    model, wanted = shard(seeded(tied=True), mp_policy=BF16), seeded(tied=True)
    params = list(model.parameters())
    with record_collectives() as record, full_params(model):
        for one, two in zip(model.parameters(), wanted.parameters(), strict=True):
            assert type(one.data) is torch.Tensor
            assert one.equal(two)
        assert model.head.weight is model.embed.weight
        with pytest.raises(RuntimeError, match="are whole inside of full_params"):
            loss_of(model, tokens())
        with pytest.raises(RuntimeError, match="are whole inside of full_params"):
            model.state_dict()
        model.blocks[0].weight.data += 1
        model.norm.weight.data = torch.full((8,), 2.0)
    wanted.blocks[0].weight.data += 1
    wanted.norm.weight.data.fill_(2)
    assert record.kinds.count("all_gather") == 4  # of a group each
    assert all(one is two for one, two in zip(params, model.parameters(), strict=True))
    assert_same_values(get_full_state_dict(model), wanted.state_dict())
    loss_of(model, tokens()).backward()


@on_ranks(2)
def test_a_product_of_two_weights_raises_without_a_collective_and_names_full_params():
    model = shard(seeded())
    one, two = model.blocks[0].weight, model.blocks[1].weight
    for call in (lambda: one @ two, lambda: two.t(), lambda: torch.addmm(one, one, two)):
        with (
            record_collectives() as record,
            pytest.raises(NotImplementedError, match=r"full_params\(model\)"),
        ):
            call()
        assert record.kinds == []


@on_ranks(1)
def test_what_is_written_is_dropped_on_request_and_after_a_failure():
    model = shard(seeded())
    with full_params(model, writeback=False):
        model.head.weight.data.zero_()
    with contextlib.suppress(KeyError), full_params(model):
        model.head.weight.data.zero_()
        raise KeyError
    message = r"head.weight is \(2,\) now; expected a tensor of shape \(12, 8\)"
    with pytest.raises(ValueError, match=message), full_params(model):
        model.head.weight = nn.Parameter(torch.zeros(2))
    assert loss_of(model, tokens()).equal(loss_of(seeded(), tokens()))
    offload(model)
    with pytest.raises(RuntimeError, match="are offloaded"), full_params(model):
        pass


class Unreadable(dict[str, torch.Tensor]):
    """Values that are read from a file when they are asked for."""

    def __getitem__(self, name):
        raise OSError(f"{name} cannot be read")


@on_ranks(3)
def test_a_full_state_dict_loads_into_a_model_on_meta():
    model, wanted = shard(seeded()), seeded().state_dict()
    for rank0_only in (False, True):
        found = get_full_state_dict(model, rank0_only=rank0_only, cpu_offload=True)
        expected = {} if rank0_only and dist.get_rank() else dict(wanted)
        assert_same_values(found, expected)
        other = shard(on_meta())
        bias = torch.zeros(8, dtype=torch.int64)
        for values, kind, message in (
            ({**found, "blocks.0.weight": torch.zeros(2)}, ValueError, r"blocks.0.weight: expected shape"),
            ({**found, "more": torch.zeros(2)}, ValueError, "more of the state dict is not in the model"),
            ({}, ValueError, "is missing from the state dict"),
            ({**found, "blocks.0.bias": bias}, TypeError, "blocks.0.bias: a tensor of torch.int64 for"),
            (Unreadable(found), OSError, "cannot be read"),
        ):
            with pytest.raises(kind, match=message):
                set_full_state_dict(other, values, rank0_only=rank0_only)
        assert all(param.is_meta for param in other.parameters())
        set_full_state_dict(other, found, rank0_only=rank0_only)
        assert loss_of(other, tokens()).equal(loss_of(model, tokens()))


@pytest.mark.parametrize("block_policy", [None, whole()])
@on_ranks(2)
def test_weights_that_are_kept_as_codes_go_as_values(block_policy):
    quantize = QuantizationPolicy(at_rest=BlockInt8(8))
    model = shard(seeded().requires_grad_(False), quantization_policy=quantize, block_policy=block_policy)
    values = get_full_state_dict(model, rank0_only=True)
    assert all(type(value) is torch.Tensor for value in values.values())
    other = shard(seeded(seed=1).requires_grad_(False), quantization_policy=quantize)
    set_full_state_dict(other, values, rank0_only=True)
    for name, value in get_full_state_dict(other).items():
        torch.testing.assert_close(value, seeded().state_dict()[name], atol=0.02, rtol=0.02)


@pytest.mark.parametrize("mesh_shape", [(3,), (1, 3)])
@on_ranks(3)
def test_weights_in_a_state_dict_take_what_torchs_distribute_tensor_makes(mesh_shape):
    model, wanted = shard(seeded(), mesh=mesh_of(*mesh_shape)), seeded(seed=1).state_dict()
    for name, value in model.state_dict().items():
        value.copy_(distribute_tensor(wanted[name], value.device_mesh, value.placements))
    assert_same_values(get_full_state_dict(model), wanted)


@on_ranks(2)
def test_a_rank_alone_may_replace_values_that_no_other_rank_shards():
    model = shard(seeded(), mesh=rank_mesh(2, 1, names=("replicate", "shard")))
    with record_collectives() as record, torch.no_grad():
        for param in model.parameters() if dist.get_rank() == 0 else ():
            param.data = param.data * 2
        after = model(tokens())
    assert {event.kind for event in record.events} <= {"all_reduce"}  # comparisons of texts
    alone = seeded()
    for param in alone.parameters():
        param.data *= 2 - dist.get_rank()
    torch.testing.assert_close(after, alone(tokens()))


@pytest.mark.parametrize(
    "options",
    [{"quantization_policy": QuantizationPolicy(weights=BlockFP8((4, 4)))}, {"reshard_after_forward": False}],
    ids=["codes", "units that stay gathered"],
)
@on_ranks(3)
def test_a_write_that_torch_does_not_count_is_seen_by_the_next_forward(options):
    model, wanted = shard(seeded(width=24), **options), seeded(width=24)
    params = list(model.parameters())  # sharded: what an optimizer has
    with torch.no_grad():
        model(tokens())
        for p in params:
            p.to_local().data.mul_(2)
            torch.autograd.graph.increment_version(
                p.to_local()
            )  # as the docstring of QuantizationPolicy says
        for p in wanted.parameters():
            p.mul_(2)
        assert model(tokens()).equal(shard(wanted, **options)(tokens()))


class Rotary(nn.Module):
    """With a table that no state dict has."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0) + 1, persistent=False)
        self.register_buffer("mask", torch.tensor([True, False, True, True]), persistent=False)

    def forward(self, x):
        return self.lin(x * self.table * self.mask)


def on_meta_except(*ranks):
    """The model with values on these ranks, and without elsewhere."""
    model = seeded(Rotary) if dist.get_rank() in ranks else on_meta(Rotary)
    fully_shard(model)
    return model if dist.get_rank() in ranks else model.to_empty(device="cpu")


@on_ranks(2)
def test_buffers_that_got_the_zeros_that_were_in_their_new_memory_have_values():
    model, alone = on_meta(Rotary), seeded(Rotary)
    model.register_buffer("zeros", torch.zeros(3, device="meta"), persistent=False)
    model.register_buffer("sparse", torch.eye(2).to_sparse(), persistent=False)
    fully_shard(model)
    with mock.patch.object(torch, "empty_like", torch.zeros_like):  # as new memory often is
        model.to_empty(device="cpu")
    with pytest.raises(ValueError, match=r"\['table', 'mask', 'zeros'\] have no values"):
        set_full_state_dict(model, alone.state_dict())
    set_full_state_dict(model, alone.state_dict(), strict=False)
    for name, value in {**dict(alone.named_buffers()), "zeros": torch.zeros(3)}.items():
        model._buffers[name].data.copy_(value)  # which is not counted, nor what a collective writes
    torch.testing.assert_close(model(torch.ones(2, 4)), alone(torch.ones(2, 4)))


def whole_if_rank_0():
    return seeded(Rotary).state_dict() if dist.get_rank() == 0 else {}


@on_ranks(3)
def test_buffers_that_no_state_dict_has_come_from_rank_0_with_the_others():
    model, x = on_meta_except(0), torch.ones(2, 4)
    set_full_state_dict(model, whole_if_rank_0(), rank0_only=True)
    torch.testing.assert_close(model(x), seeded(Rotary)(x))


@pytest.mark.parametrize("ranks", [(), (0,)])
@on_ranks(3)
def test_buffers_without_values_are_refused_by_the_first_forward_of_all_ranks(ranks):
    model, x = on_meta_except(*ranks), torch.ones(2, 4)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole_if_rank_0(), options=options)
    for _ in range(2 - len(ranks)):  # where they differ a second one would compare once more, and wait
        with pytest.raises(RuntimeError, match=r"table, mask: buffers without values.*set_full_state_dict"):
            model(x)
    if not ranks:
        mask, model.mask = model.mask, model.mask.to("meta")
        with pytest.raises(RuntimeError, match=r"table, mask: buffers without values"):
            model(x)
        model.mask = mask
        with torch.no_grad():
            model.table.copy_(torch.arange(4.0) + 1)
            model.mask = torch.tensor([True, False, True, True])
        torch.testing.assert_close(model(x), seeded(Rotary)(x))


@pytest.mark.parametrize("from_rank0", [True, False])
@on_ranks(3)
def test_trainers_setters_return_the_names_that_were_not_loaded(from_rank0):
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    full: Any = {
        "1.weight": torch.ones(4, 6),
        "1.bias": torch.ones(4),
        "head.weight": torch.ones(2),
        "0.bias": torch.ones(6),
    }
    wanted = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)).load_state_dict(full, strict=False)
    assert (wanted.missing_keys, wanted.unexpected_keys) == (["0.weight"], ["head.weight"])
    fully_shard(model)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank0, strict=False)
    with full_state_dicts():
        setter = torch.distributed.checkpoint.state_dict.set_model_state_dict
        got = setter(model, full if not from_rank0 or dist.get_rank() == 0 else {}, options=options)
    assert got == wanted
    assert get_full_state_dict(model)["1.bias"].sum() == 4
