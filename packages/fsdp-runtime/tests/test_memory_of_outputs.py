"""What outlives a unit's pass and needs its gathered memory: errors name the unit and what works."""

from typing import Any

import pytest
import torch
from runtime_helpers import BF16, assert_same_gradients
from torch import nn

from fsdp_runtime import fully_shard
from ragged_shard.testing import on_ranks


class Returns(nn.Module):
    """Returns its parameter too, in some way."""

    def __init__(self, way):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.way = way

    def forward(self, x):
        return self.linear(x), self.way(self.linear.weight)


class Around(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.inner = Returns(way)

    def forward(self, x):
        out, weight = self.inner(x)
        return (out @ weight).float().sum()


def around(way):
    torch.manual_seed(0)
    model: Any = Around(way)
    fully_shard(model.inner, mp_policy=BF16)
    return fully_shard(model)


@pytest.mark.filterwarnings("ignore:.*returned a view")
@on_ranks(2)
def test_a_unit_that_returns_its_own_parameter_is_named_with_the_option_that_works_and_a_copy_works():
    x = torch.ones(2, 4)
    around(torch.clone)(x).backward()
    for way in (lambda weight: weight, torch.t, torch.Tensor.detach):
        model = around(way)
        for grads in (True, False):
            message = r"inner \(FSDPReturns\) returned memory .*set_reshard_after_forward\(False"
            with torch.set_grad_enabled(grads), pytest.raises(RuntimeError, match=message):
                model(x)
        model.inner.set_reshard_after_forward(False, recurse=False)
        model(x).backward()
        assert model.inner.linear.weight.grad is not None
        with torch.no_grad():
            model(x)


@on_ranks(2)
def test_a_root_that_returns_its_own_parameter_keeps_its_memory_after_an_evaluation():
    torch.manual_seed(0)
    model = Returns(lambda weight: weight)
    wanted = model.linear.weight.detach().clone()
    fully_shard(model, mp_policy=BF16)
    with torch.no_grad():
        _, weight = model(torch.ones(2, 4))
    assert weight.equal(wanted.bfloat16())
    for _ in range(2):
        out, weight = model(torch.ones(2, 4))
        (out.sum() + weight.sum()).backward()
    assert not weight._backward_hooks, "one more with each forward"


def second_order(model, x, evaluate=False):
    (grad,) = torch.autograd.grad(model(x).float().square().sum(), x, create_graph=True)
    if evaluate:
        with torch.no_grad():
            model(x)
    grad.square().sum().backward()


@on_ranks(2)
def test_a_second_backward_after_resharding_names_the_unit_and_what_works():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    alone = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    alone.load_state_dict(model.state_dict())
    fully_shard(model[0])
    fully_shard(model)
    x = torch.ones(2, 4, requires_grad=True)
    for evaluate in (False, True):
        with pytest.raises(
            RuntimeError, match=r"0 \(FSDPLinear\): .*second backward.*set_reshard_after_backward\(False\)"
        ):
            second_order(model, x, evaluate)
        model.reset_iter_state()  # type: ignore[operator]
        model.set_reshard_after_backward(False)  # type: ignore[operator]
    second_order(model, x)
    second_order(alone, x)
    assert_same_gradients(model, alone)
