"""A parameter that several units share: which unit has it, its gradient, its checkpoints, and what is refused."""

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from runtime_helpers import (
    BF16,
    Body,
    assert_same_gradients,
    assert_same_parameters,
    assert_same_values,
    check_training,
    loss_of,
    mesh_of,
    on_meta,
    seeded,
    step_of,
    tokens,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import block_optim
from fsdp_runtime import block_policies, full_params, fully_shard, get_full_state_dict, set_full_state_dict
from fsdp_runtime._schedule.model import member_of
from ragged_shard.testing import on_ranks, record_collectives, run_ranks, simulated_ranks

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


@on_ranks(4)
def test_it_trains_as_in_one_process_also_with_replicas():
    def check(order, accumulate=1, reshard=None, close=None, **options):
        def wrapped(model):
            wrap(model, order, **options)
            if reshard is not None:
                model.set_reshard_after_forward(reshard)
            return model

        make, loss = (
            partial(Body, tied=True),
            lambda model, step, rank: loss_of(model, tokens(step, rank=rank)),
        )
        check_training(make, wrapped, loss, accumulate, **(close or {}))

    for order in ORDERS:
        check(order)
        check(order, 2, mesh=mesh_of(2, 2))
    for reshard in (False, True):
        check(ORDERS[0], 2, reshard)
    check(ORDERS[0], mp_policy=BF16, close={"rtol": 0.1, "atol": 0.1})


@on_ranks(3)
def test_blocks_that_share_parameters_inside_a_unit_train_as_in_one_process():
    def loss(model, step, rank):
        generator = torch.Generator().manual_seed(10 * step + rank)
        return model(torch.randn(5, 4, generator=generator)).square().mean()

    for third in (False, True):
        for order in (
            ("inner.a", "inner.b", "left", "inner", "right", ""),
            ("", "right", "inner", "left", "inner.a"),
        ):
            check_training(partial(Nested, third=third), partial(wrap, order=order), loss)


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
def test_it_moves_out_of_units_that_are_gathered_and_have_others_left():
    model, x = seeded(Nested), torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))
    for module in (model.inner.a, model.inner.b):
        fully_shard(module)
        module.unshard()
    model = fully_shard(model, shard_placement_fn=lambda param: None)
    assert owner(model, "inner.a.weight") == ""
    plain = seeded(Nested)
    model(x[dist.get_rank()]).square().mean().backward()
    plain(x).square().mean().backward()
    assert_same_gradients(model, plain)


class Experts(nn.Module):
    """Two experts that share a weight, so large that it is reduced by itself."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 520)
        self.experts = nn.ModuleList(nn.Linear(520, 520) for _ in range(2))
        self.experts[1].weight = self.experts[0].weight

    def forward(self, x, chosen):
        x = self.first(x)
        for number in chosen:
            x = x + self.experts[number](x).tanh()
        return x.square().mean()


@on_ranks(3)
def test_it_is_reduced_if_some_ranks_skip_its_modules_and_not_if_all_do():
    chosen: list[list[list[int]]] = [[[0], [], [0, 1]], [[], [], []], [[], [1], []]]
    model: Any = seeded(Experts)
    for expert in model.experts:
        fully_shard(expert, skippable=True)
    fully_shard(model)
    plain = seeded(Experts)
    for accumulate in (False, True):
        for step, of_ranks in enumerate(chosen):
            model.set_requires_gradient_sync(not accumulate or step == 2)
            x = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(step))
            model(x[dist.get_rank()], of_ranks[dist.get_rank()]).backward()
            for rank, parts in enumerate(of_ranks):
                (plain(x[rank], parts) / 3).backward()
            if accumulate and step < 2:
                continue
            assert_same_gradients(model, plain, rtol=1e-4, atol=1e-7)
            model.zero_grad()
            plain.zero_grad()


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


# -- checkpoints -------------------------------------------------------------------------------------------------------

LAYOUTS = [("embed,head", "blocks.0", ""), ("embed", "head", ""), ("",)]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def save(folder):
    for tied in (False, True):
        model = wrap(seeded(tied=tied), LAYOUTS[0])
        optimizer = adamw(model)
        step_of(model, optimizer, rank=0)  # the same on every rank, so that the world size does not matter
        values, states = get_state_dict(model, optimizer)
        dcp.save({"model": values, "optimizer": states}, checkpoint_id=folder / str(tied))


def take(model, state, assign):
    model.load_state_dict(state, assign=assign)
    loss_of(model, tokens(rank=0)).backward()  # takes what was assigned


def load(folder):
    plain = seeded(tied=True)
    saved, twin = copy.deepcopy(plain.state_dict()), adamw(plain)
    dcp.load({"model": saved}, checkpoint_id=folder / "True")
    for step in range(2):
        step_of(plain, twin, step, rank=0)
    for order in LAYOUTS:
        model = wrap(seeded(tied=True, seed=1), order)
        optimizer = adamw(model)
        values, states = get_state_dict(model, optimizer)
        assert list(values) == list(plain.state_dict())
        dcp.load({"model": values, "optimizer": states}, checkpoint_id=folder / "True")
        set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=states)
        step_of(model, optimizer, 1, rank=0)
        assert_same_parameters(model, plain, rtol=1e-4, atol=1e-5)
        for assign in (False, True):
            model = wrap(seeded(tied=True, seed=1), order)
            state = model.state_dict()
            assert state["head.weight"].to_local().data_ptr() == state["embed.weight"].to_local().data_ptr()
            dcp.load({"model": state}, checkpoint_id=folder / "True")
            take(model, state, assign)
            assert model.head.weight is model.embed.weight
            assert_same_values(get_full_state_dict(model), saved)
            dcp.load({"model": state}, checkpoint_id=folder / "False")
            with pytest.raises(ValueError, match=r"weight is one parameter in 2 modules, .* different"):
                take(model, state, assign)


def test_training_resumes_with_other_units_and_ranks_but_not_untied_values(tmp_path):
    run_ranks(2, save, tmp_path)
    run_ranks(3, load, tmp_path)


@on_ranks(3)
def test_full_values_load_into_a_tied_model_and_raise_where_they_differ():
    wanted, untied = seeded(tied=True, seed=1).state_dict(), seeded(seed=1).state_dict()
    for order in LAYOUTS:
        for put in (nn.Module.load_state_dict, set_full_state_dict):
            model = wrap(seeded(tied=True), order)
            put(model, wanted)
            assert_same_values(get_full_state_dict(model), wanted)
            with pytest.raises(ValueError, match="one parameter"):
                put(model, untied)
        for values in (wanted, untied):  # one name at a time may differ
            name = "head.weight" if values is wanted else "embed.weight"
            model.load_state_dict({name: values[name]}, strict=False)
            assert model.head.weight.full_tensor().equal(values[name])
