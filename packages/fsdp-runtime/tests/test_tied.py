"""A parameter that several units share: which unit has it, what it sends, and what is refused."""

import itertools
from typing import Any

import pytest
import torch
from runtime_helpers import (
    Body,
    loss_of,
    on_meta,
    seeded,
    step_of,
    tokens,
)
from torch import nn

import block_optim
from fsdp_runtime import block_policies, full_params, fully_shard, get_full_state_dict
from fsdp_runtime._schedule.model import member_of
from ragged_shard.testing import on_ranks, record_collectives, simulated_ranks

# -- which unit has it -------------------------------------------------------------------------------------------------


def wrap(model, order, **options):
    """Make units of these modules, in this order; several names with commas are one unit."""
    for names in order:
        modules = [model.get_submodule(name) for name in names.split(",")]
        fully_shard(modules[0] if len(modules) == 1 else modules, **options)
    return model


def owner(model, name):
    """The names of the modules whose unit has a parameter, with commas."""
    param = model.get_parameter(name)
    return ",".join(
        path
        for path, module in model.named_modules()
        if (member := member_of(module)) and any(each.sharded is param for each in member.unit.params)
    )


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x).tanh())


class Nested(nn.Module):
    """`inner` has a pair of its own; `alias` is a module that `left` and `right` both hold."""

    def __init__(self, third=False):
        super().__init__()
        self.inner = Pair()
        self.left, self.right = (nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
        self.left.append(nn.Linear(4, 4))
        self.right.append(self.left[1])
        self.last = nn.Linear(4, 4)
        if third:
            self.last.weight = self.inner.a.weight

    def forward(self, x):
        return self.last(self.right(self.left(self.inner(x)).tanh()))


OWNERS: list[Any] = [  # a model, its units, and the unit of some parameters
    (lambda: Body(tied=True), ("embed", "head", "blocks.1", ""),
     {"embed.weight": "", "head.weight": "", "blocks.1.weight": "blocks.1", "norm.weight": ""}),
    (lambda: on_meta(tied=True), ("embed", "head", ""), {"embed.weight": "", "head.weight": ""}),
    (lambda: Body(tied=True), ("embed,head", ""), {"embed.weight": "embed,head"}),
    (Nested, ("inner.a", "inner.b", "inner", ""),
     {"inner.a.weight": "inner", "inner.b.bias": "inner.b", "last.weight": ""}),
    (lambda: Nested(third=True), ("inner.a", "inner", "inner.b", ""),
     {"inner.a.weight": "", "inner.b.bias": "inner.b", "last.weight": ""}),
    (Nested, ("left", "right", ""),
     {"left.1.weight": "", "right.1.bias": "", "left.0.weight": "left", "right.0.weight": "right"}),
    (Nested, ("left.1", "left", "right", ""),
     {"left.1.weight": "left.1", "right.1.bias": "left.1", "left.0.weight": "left"}),
]  # fmt: skip


@pytest.mark.parametrize(("make", "units", "owners"), OWNERS)
def test_a_shared_parameter_belongs_to_the_smallest_unit_around_its_modules(make, units, owners):
    for order in itertools.permutations(units):
        with simulated_ranks(3):
            model = wrap(make(), order)
            assert {name: owner(model, name) for name in owners} == owners, order
            names = [[name for name, _ in one.named_parameters()] for one in (model, make())]
            assert names[0] == names[1], order
            model.to_empty(device="cpu")
            assert {name: owner(model, name) for name in owners} == owners, order


# -- gradients ---------------------------------------------------------------------------------------------------------

ORDERS = [
    ("embed", "head", "blocks.0", ""),
    ("blocks.0", "", "head", "embed"),
    ("head", "", "blocks.0", "embed"),
]


@on_ranks(3)
def test_block_optimizers_update_it_as_where_one_unit_has_all():
    makes = (
        lambda model: block_optim.AdamW8bit(model.parameters(), lr=0.05),
        lambda model: block_optim.mixed_optimizer_for(model, verbose=False),
    )
    for make in makes:
        found = []
        for order in (*ORDERS, ("",)):
            model = wrap(seeded(tied=True), order, block_policy=block_policies.rows(1))
            optimizer = make(model)
            for step in range(2):
                step_of(model, optimizer, step)
            found.append(get_full_state_dict(model))
            torch.testing.assert_close(found[-1], found[0], rtol=1e-4, atol=1e-5)
        assert not found[0]["embed.weight"].equal(seeded(tied=True).embed.weight)


@on_ranks(3)
def test_it_is_gathered_and_reduced_once_so_that_nothing_is_sent_in_addition():
    def collectives(tied, order):
        model = wrap(seeded(tied=tied), order)
        loss_of(model, tokens()).backward()
        with record_collectives() as record:
            loss_of(model, tokens(1)).backward()
        return sorted(record.kinds), record.bytes_sent

    for order in ORDERS:
        (kinds, sent), (untied, more) = (collectives(tied, order) for tied in (True, False))
        assert kinds == ["all_gather"] * 3 + ["reduce_scatter"] * 2  # blocks.0 twice, the root once
        assert len(untied) > len(kinds)
        assert sent < more


# -- what is refused ---------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_uses_outside_of_the_unit_that_has_it_raise_on_every_rank_by_name():
    model = wrap(seeded(tied=True), ("embed", "head"))
    x = model.embed(tokens())
    with pytest.raises(RuntimeError, match=r"weight is the same parameter as weight .*the model itself"):
        model.head(x)
    fully_shard(model)
    check = wrap(seeded(tied=True), ("embed", "head", ""))
    assert loss_of(model, tokens()).item() == loss_of(check, tokens()).item()
    model = wrap(seeded(tied=True), ("embed", "head", ""))
    with pytest.raises(RuntimeError, match=r"embed\.weight is tied to modules outside.* Body gathers it"):
        model.embed(tokens())
    model.unshard()
    assert model.embed(tokens()).equal(seeded(tied=True).embed(tokens()))
    model = wrap(seeded(tied=True), ("embed",))
    with pytest.raises(RuntimeError, match=r"call fully_shard on the model too"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


@on_ranks(3)
def test_tying_after_sharding_raises_unless_it_was_tied_before():
    model = wrap(seeded(tied=True), ("embed", "head", ""))
    before = model.head.weight
    model.head.weight = model.embed.weight
    assert model.head.weight is before
    loss_of(model, tokens()).backward()
    for order, ran, gathered in itertools.product((("",), ("embed", "head", "")), *[(False, True)] * 2):
        model = wrap(seeded(), order)
        if ran:
            loss_of(model, tokens()).backward()
        values = model.embed.weight.full_tensor()
        if gathered:
            model.unshard()
        model.head.weight = model.embed.weight
        model.reshard()  # what was tied while it was gathered is not forgotten
        with pytest.raises((RuntimeError, ValueError), match=r"weight.*Tie parameters before fully_shard"):
            loss_of(model, tokens())
        if not gathered:
            with pytest.raises(ValueError, match=r"weight was replaced by .*weight.*Tie parameters before"):
                model.to(torch.float32)
            assert model.embed.weight.full_tensor().equal(values)


@on_ranks(3)
def test_other_values_for_one_of_its_modules_raise_on_every_rank():
    model = wrap(seeded(tied=True), ("embed", "head", ""))
    ones = torch.ones(12, 8)
    with full_params(model):
        model.embed.weight, model.head.weight = nn.Parameter(ones), nn.Parameter(ones.clone())
    assert model.head.weight is model.embed.weight
    for one in (model.embed, model.head):
        with pytest.raises(ValueError, match=r"weight is one parameter in 2 modules"), full_params(model):
            one.weight = nn.Parameter(2 * ones)
        assert model.head.weight is model.embed.weight
        assert model.head.weight.full_tensor().equal(ones)
    model.head.weight = nn.Parameter(ones)
    with pytest.raises(ValueError, match=r"was replaced in one of the 2 modules that share it"):
        loss_of(model, tokens())
