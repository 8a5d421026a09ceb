"""What outlives a unit's pass and needs its gathered memory: errors name the unit and what works."""

import copy
import gc
from typing import Any

import pytest
import torch
from runtime_helpers import BF16, assert_same_gradients, loss_of, on_meta, seeded, shard, tokens
from torch import nn

from fsdp_runtime import fully_shard
from fsdp_runtime.memory import gathered_memory
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


@on_ranks(2)
def test_a_unit_that_returns_its_own_parameter_is_named_with_the_remedy():
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


class Captures(nn.Module):
    """Keeps a result that is no output of it, computed before or after the output."""

    def __init__(self, late):
        super().__init__()
        self.late = late
        self.main, self.side = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        out = self.main(x).tanh() if self.late else None
        self.kept = self.side(x).tanh()
        return self.main(x).tanh() if out is None else out


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("late", [False, True])
@on_ranks(2)
def test_backward_reads_no_gathered_memory_that_is_freed_or_being_filled(late, frozen):
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 6), *(Captures(late) for _ in range(3)))
    alone = copy.deepcopy(model)
    for each in (model, alone):
        each[1:].requires_grad_(not frozen)
    for block in model[1:]:
        fully_shard(block)
    fully_shard(model)
    x = torch.ones(4, 6)

    def backward(each, *, all_outputs):
        out, kept = each(x), each[1].kept.square().mean()
        (out.square().mean() + kept if all_outputs else kept).backward()

    for all_outputs in (True, False):  # with them block 1 is gathered ahead
        if late or not all_outputs:
            with pytest.raises(RuntimeError, match="needed for gradient computation"):
                backward(model, all_outputs=all_outputs)
            model.reset_iter_state()
        else:
            backward(model, all_outputs=True)
            backward(alone, all_outputs=True)
            assert_same_gradients(model, alone)


@on_ranks(2)
def test_memory_is_kept_between_steps_until_it_is_switched_off():
    gc.collect()  # models of other tests, which share the recycler
    model = shard(on_meta())
    whole, before = sum(param.numel() for param in model.parameters()) * 4, gathered_memory(model).lent_bytes
    for keep in (True, False, True):
        model.set_keep_unsharded_storage(keep)
        if model.embed.weight.is_meta:
            model.to_empty(device="cpu")
            model.load_state_dict(seeded().state_dict())
        model.reshard()
        loss_of(model, tokens()).backward()
        assert (gathered_memory(model).lent_bytes - before >= whole) == keep
