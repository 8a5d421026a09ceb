"""A `fully_shard` that raises leaves modules, and the units around them, as they were."""

from functools import partial

import pytest
import torch
from runtime_helpers import Body, loss_of, seeded, tokens
from torch import nn

import layout_planner
from fsdp_runtime import fully_shard
from ragged_shard.testing import on_ranks


def snapshot(model):
    """What a refused call must not change; tensors are compared as objects."""
    return [
        (
            type(module),
            {name: id(param) for name, param in module._parameters.items()},
            {name: id(buffer) for name, buffer in module._buffers.items()},
            [len(module._forward_hooks), len(module._forward_pre_hooks), len(module._state_dict_hooks)],
            set(module.__dict__),
        )
        for module in model.modules()
    ]


class TwoDtypes(nn.Module):
    """Two groups of parameters, planned one after the other."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x):
        return self.second(self.first(x).bfloat16()).float().sum()


def wrong_for_the_second(name, param):
    return "no block" if name == "second.weight" else None


def planner_that_refuses(refuses, specs, ranks, *, align):
    if refuses(specs):
        raise ArithmeticError("refused")
    return layout_planner.plan(specs, ranks, align=align)


@on_ranks(2)
def test_a_module_whose_second_group_is_refused_is_untouched_and_can_be_sharded_again():
    for error, options in (
        ((TypeError, ValueError), {"block_policy": wrong_for_the_second}),
        (
            ArithmeticError,
            {"planner": partial(planner_that_refuses, lambda specs: specs[0].name == "second.weight")},
        ),
    ):
        model, reference = seeded(TwoDtypes), seeded(TwoDtypes)
        before = snapshot(model)
        with pytest.raises(error):
            fully_shard(model, **options)
        assert snapshot(model) == before
        fully_shard(model)
        x = torch.ones(2, 4)
        torch.testing.assert_close(model(x), reference(x), rtol=0, atol=0)


@on_ranks(2)
def test_an_outer_unit_that_cannot_lay_out_what_it_keeps_refuses_the_inner_one_and_nothing_changes():
    refusing = False

    def planner(specs, ranks, *, align):
        return planner_that_refuses(lambda _: refusing, specs, ranks, align=align)

    model, reference = fully_shard(seeded(Body), planner=planner), seeded(Body)
    values = {name: param.to_local().clone() for name, param in model.named_parameters()}
    before, refusing = snapshot(model), True
    with pytest.raises(ArithmeticError, match="refused"):
        fully_shard(model.blocks[1])
    assert snapshot(model) == before
    for name, param in model.named_parameters():
        assert param.to_local().equal(values[name]), name
    refusing = False
    fully_shard(model.blocks[1])
    torch.testing.assert_close(loss_of(model, tokens()), loss_of(reference, tokens()))


@on_ranks(2)
def test_a_refusal_inside_a_gathered_unit_leaves_it_gathered():
    model, reference = fully_shard(seeded(Body)), seeded(Body)
    model.unshard()
    before = snapshot(model)
    with pytest.raises((TypeError, ValueError)):
        fully_shard(model.blocks[1], block_policy=lambda name, param: "no block")  # type: ignore[arg-type, return-value]
    assert snapshot(model) == before
    fully_shard(model.blocks[1])
    torch.testing.assert_close(loss_of(model, tokens()), loss_of(reference, tokens()))
