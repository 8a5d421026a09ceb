"""Small gradients wait for their neighbours, and are copied into the buffer in one call."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_runtime import fully_shard
from fsdp_runtime._schedule.model import member_of
from ragged_shard.testing import on_ranks, simulated_ranks


class Terms(nn.Module):
    """As many small parameters as asked, then a large one, whose gradient comes first."""

    def __init__(self, small=6, large=0):
        super().__init__()
        self.small = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(small)])
        self.large = nn.Parameter(torch.ones(8 * large, 8)) if large else None

    def forward(self, x):
        for term in self.small:
            x = x + term
        return x if self.large is None else (x @ self.large.T).sum(-1, keepdim=True) + x


GRADIENTS = ((8,), (800, 8))


class Copies(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.of = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.aten._foreach_copy_.default:
            self.of.append([t.numel() for t in args[0]])
        elif op is torch.ops.aten.copy_.default and args[0].shape in GRADIENTS:
            self.of.append(args[0].numel())
        return op(*args, **(kwargs or {}))


def copies_of(model):
    model(torch.ones(2, 8)).sum().backward()
    with Copies() as seen:
        model(torch.ones(2, 8)).sum().backward()
    return seen.of


@pytest.fixture
def ranks():
    with simulated_ranks(4):
        yield


def test_the_small_gradients_of_a_unit_are_copied_in_one_call(ranks):
    assert copies_of(fully_shard(Terms(6))) == [[8] * 6]


def test_a_large_gradient_is_copied_when_it_comes(ranks):
    assert copies_of(fully_shard(Terms(6, large=100))) == [6400, [8] * 6]


def test_a_unit_around_others_keeps_no_gradient(ranks):
    model = nn.Sequential(Terms(1), Terms(1))
    model.register_parameter("extra", nn.Parameter(torch.ones(8)))
    model.forward = lambda x: model[1](model[0](x + model.extra))
    fully_shard(model[0])
    assert 8 in copies_of(fully_shard(model))


def test_no_gradient_is_kept_that_would_keep_a_larger_one_alive(ranks):
    model = Terms(0)
    model.stacked = nn.Parameter(torch.ones(1, 8))
    seen = []
    model.forward = lambda x: x + First.apply(model.stacked)

    class First(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight.clone()

        @staticmethod
        def backward(ctx, grad):
            return torch.ones(9000, 8)[:1]

    fully_shard(model)
    gradients = member_of(model).unit.groups[0].gradients
    keep = type(gradients).close

    def closing(self):
        seen.append(len(self._kept))
        return keep(self)

    type(gradients).close = closing
    try:
        model(torch.ones(2, 8, requires_grad=True)).sum().backward()
    finally:
        type(gradients).close = keep
    assert seen == [0]


@pytest.mark.parametrize("accumulate", [1, 3])
@on_ranks(3)
def test_gradients_are_those_of_one_rank_also_where_they_accumulate(accumulate):
    torch.manual_seed(0)
    models: list[Any] = [Terms(5, large=90), Terms(5, large=90)]
    plain, model = models
    model.load_state_dict(plain.state_dict())
    fully_shard(model)
    for step in range(accumulate):
        model.set_requires_gradient_sync(step == accumulate - 1)
        x = torch.full((2, 8), step + 1.0)
        for one in models:
            one(x).sum().backward()
    for theirs, mine in zip(*(one.parameters() for one in models), strict=True):
        assert torch.equal(mine.grad.full_tensor(), theirs.grad)
