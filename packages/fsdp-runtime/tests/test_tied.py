"""A parameter that several units share: which unit has it, what it sends, and what is refused."""

import itertools

import pytest
import torch
from runtime_helpers import assert_same_gradients, loss_of, of_values, seeded, tokens
from torch import nn

from fsdp_runtime import full_params, fully_shard
from ragged_shard import RaggedDTensor
from ragged_shard.testing import on_ranks, record_collectives


def wrap(model, order, **options):
    """Make units of these modules, in this order; several names with commas are one unit."""
    for names in order:
        modules = [model.get_submodule(name) for name in names.split(",")]
        fully_shard(modules[0] if len(modules) == 1 else modules, **options)
    return model


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


def bottom_up(model, units):
    """Orders of units in which each comes before those around it."""
    inside = {name: set(model.get_submodule(name).modules()) for name in units}
    for order in itertools.permutations(units):
        if not any(inside[later] < inside[name] for name, later in itertools.combinations(order, 2)):
            yield order


@on_ranks(3)
def test_nested_shared_parameters_and_modules_train_in_any_order_of_inner_units():
    """A parameter of two modules in one unit, of two units and of a unit and its root; a module of two units."""
    x = torch.randn(3, 4)
    for third, units in ((False, ("inner.a", "inner.b", "inner", "")), (True, ("inner.a", "inner", "inner.b", "")),
                         (True, ("inner.a", "last", "")), (False, ("left.1", "left", "right", "")),
                         (False, ("left", "right", ""))):  # fmt: skip
        for order in bottom_up(Nested(), units):
            alone, model = (seeded(Nested, third=third) for _ in range(2))
            wrap(model, order)
            assert all(isinstance(param, RaggedDTensor) for param in model.parameters())
            for each in (alone, model):
                each(x).square().sum().backward()
            assert_same_gradients(model, alone)
            names = [[name for name, _ in each.named_parameters()] for each in (alone, model)]
            assert names[0] == names[1], order


class Stacks(nn.Module):
    """An embedding that two stacks and a head share."""

    def __init__(self):
        super().__init__()
        embeddings = [nn.Embedding(9, 4) for _ in range(2)]
        self.encoder, self.decoder = (nn.Sequential(each, nn.Linear(4, 4)) for each in embeddings)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = embeddings[1].weight = embeddings[0].weight

    def forward(self, tokens):
        return self.head(self.encoder(tokens) + self.decoder(tokens.flip(0)))


@on_ranks(2)
def test_an_embedding_of_two_stacks_and_a_head_is_one_distributed_object_after_each_call():
    words = torch.arange(6).view(2, 3)
    for order in bottom_up(Stacks(), ("encoder.0", "encoder", "decoder.0", "decoder", "head", "")):
        model = seeded(Stacks)
        for name in order:
            wrap(model, (name,))
            module = model.get_submodule(name)
            assert all(isinstance(param, RaggedDTensor) for param in module.parameters())
        assert model.head.weight is model.encoder[0].weight is model.decoder[0].weight
        with record_collectives() as record:
            loss = model(words).square().sum()
        assert record.kinds.count("all_gather") == 3  # the root's, and each stack's
        torch.testing.assert_close(loss, seeded(Stacks)(words).square().sum())


ORDERS = [("embed", "head", "blocks.0", ""), ("head", "blocks.0", "embed", "")]


@on_ranks(3)
def test_it_is_gathered_and_reduced_once_so_that_nothing_is_sent_in_addition():
    def collectives(tied, order):
        model = wrap(seeded(tied=tied), order)
        loss_of(model, tokens()).backward()
        with record_collectives() as record:
            loss_of(model, tokens(1)).backward()
        return sorted(event.kind for event in of_values(record)), record.bytes_sent

    for order in ORDERS:
        (kinds, sent), (untied, more) = (collectives(tied, order) for tied in (True, False))
        assert kinds == ["all_gather"] * 3 + ["reduce_scatter"] * 2, (order, kinds)
        assert len(untied) > len(kinds)
        assert sent < more


@on_ranks(3)
def test_uses_outside_of_the_unit_that_has_it_raise_on_every_rank_by_name():
    model = wrap(seeded(tied=True), ("embed", "head"))
    x = model.embed(tokens())
    with pytest.raises(RuntimeError, match=r"weight is the same parameter as weight .*the model itself"):
        model.head(x)
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
