"""How gradients are copied, scaled and reduced."""

import itertools
import random
import time
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import (
    BF16,
    Ops,
    assert_same_gradients,
    loss_of,
    plain_backward,
    same_bits,
    seeded,
    shard,
    tokens,
)
from torch import nn
from torch.distributed.tensor import Replicate

from dbuffer.transport import Collectives
from fsdp_runtime import fully_shard
from fsdp_runtime._grads.scaling import ReduceOptions, scaling
from fsdp_runtime._schedule.model import member_of
from ragged_shard.testing import on_ranks, rank_mesh, simulated_ranks


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


def copies_of(model):
    def note(op, args):
        if op is torch.ops.aten._foreach_copy_.default:
            copies.append([t.numel() for t in args[0]])
        elif op is torch.ops.aten.copy_.default and args[0].shape in ((8,), (800, 8)):
            copies.append(args[0].numel())

    model(torch.ones(2, 8)).sum().backward()
    copies: list[Any] = []
    with Ops(note):
        model(torch.ones(2, 8)).sum().backward()
    return copies


@pytest.fixture
def ranks():
    with simulated_ranks(4):
        yield


def test_small_gradients_are_copied_in_one_call_and_a_large_one_when_it_comes(ranks):
    assert copies_of(fully_shard(Terms(6))) == [[8] * 6]
    assert copies_of(fully_shard(Terms(6, large=100))) == [6400, [8] * 6]


def test_a_unit_around_others_keeps_no_gradient(ranks):
    model = nn.Sequential(Terms(1), Terms(1))
    model.register_parameter("extra", nn.Parameter(torch.ones(8)))
    model.forward = lambda x: model[1](model[0](x + model.extra))
    fully_shard(model[0])
    assert 8 in copies_of(fully_shard(model))


def outcome(how, shards, replicas, gradient=1.0):
    """What one element becomes if every rank has the same gradient."""
    one = gradient * how.before
    inside = one if how.op == "avg" else one * shards / (how.divide or 1)
    return inside if how.replica_op == "avg" else inside * replicas / (how.replica_divide or 1)


DTYPES, FACTORS = (torch.float32, torch.bfloat16, torch.float16), (None, 1.0, 3.0, 128.0)


@pytest.mark.parametrize(("shards", "replicas"), [(1, 1), (4, 1), (3, 2), (64, 16)])
def test_the_sum_is_divided_by_the_factor_and_what_replicas_have_in_common_stays(shards, replicas):
    ranks = shards * replicas
    for case in itertools.product(DTYPES, (False, True), FACTORS):
        dtype, force_sum, factor = case
        how = scaling(ReduceOptions(divide_factor=factor, force_sum=force_sum), dtype, shards, replicas)
        assert outcome(how, shards, replicas) == pytest.approx(ranks / (factor or ranks)), case
        if force_sum:
            assert {how.op, how.replica_op} == {"sum"}, case
        if factor is None:
            assert how.replica_op == "avg" or how.replica_divide == replicas, case


def test_fp16_gradients_are_divided_in_two_halves():
    how = scaling(ReduceOptions(), torch.float16, 1024, 1)
    assert (how.before, how.divide) == (1 / 32, 32)


@on_ranks(4)
def test_options_set_later_do_not_touch_a_reduction_under_way():
    model = shard(seeded(), mesh=rank_mesh(2, 2, names=("replicate", "shard")))
    model.set_is_last_backward(False)
    loss_of(model, tokens()).backward()  # reductions are left under way
    model.set_requires_all_reduce(False)
    model.set_is_last_backward(True)
    loss_of(model, tokens(step=1)).backward()  # only a partial sum: shown after a later all-reduce
    assert_same_gradients(model, plain_backward(seeded()), atol=1e-7)


@on_ranks(2)
def test_a_step_that_runs_out_of_memory_in_any_gather_or_reduction_can_be_made_again():
    model = shard(seeded(), mp_policy=BF16)
    recycler = member_of(model).passes.streams.recycler
    allocate, quarantined = recycler.allocate, recycler.stats.quarantined_bytes
    for room in itertools.count():
        left = iter(range(room))

        def limited(storage, nbytes, left=left):
            if next(left, None) is None:
                raise torch.OutOfMemoryError("on purpose")
            allocate(storage, nbytes)

        with mock.patch.object(recycler, "allocate", limited):
            try:
                loss_of(model, tokens()).backward()
                break
            except torch.OutOfMemoryError:
                pass
    assert room > 10
    assert recycler.stats.quarantined_bytes == quarantined
    again = [param.grad.to_local() for param in model.parameters()]
    model.zero_grad()
    loss_of(model, tokens()).backward()
    assert same_bits(again, [param.grad.to_local() for param in model.parameters()])


class Borrower(nn.Module):
    """Its forward computes with the weight of a module that it does not call."""

    def __init__(self, borrow=lambda lender: lender.weight):
        super().__init__()
        self.lender, self.body, self.borrow = nn.Linear(8, 12, bias=False), nn.Linear(12, 5), borrow

    def forward(self, tokens):
        x = nn.functional.one_hot(tokens, 8).float()
        return self.body(torch.tanh(x @ self.borrow(self.lender).t()))


def borrowing(borrow):
    model = seeded(Borrower, borrow=borrow)
    for module in (model.lender, model.body, model):
        fully_shard(module)
    return model


def loss_of_borrower(model, step=0, rank=None):
    return model(tokens(step, vocab=8, rank=rank)).logsumexp(-1).mean()


def gathered_by_hand(weight):
    return weight.redistribute(placements=[Replicate()] * weight.device_mesh.ndim).to_local()


BORROWED = {
    "full_tensor": lambda lender: lender.weight.full_tensor(),
    "redistribute": lambda lender: gathered_by_hand(lender.weight),
    "full_tensor after a cast": lambda lender: lender.weight.double().full_tensor().float(),
}


@pytest.mark.parametrize("way", BORROWED)
@on_ranks(2)
def test_a_parameter_gathered_in_a_forward_is_refused_where_gradients_would_differ(way):
    model = borrowing(BORROWED[way])
    with pytest.raises(
        RuntimeError, match=r"in a forward.*unshard\(\) before.*register_fsdp_forward_method.*Partial"
    ):
        loss_of_borrower(model)
    with torch.no_grad():
        loss_of_borrower(model)
    model.requires_grad_(False)
    loss_of_borrower(model)


class Late:
    """A work that completes at other moments on each rank."""

    def __init__(self, work, chance):
        self.wait, self.chance = work.wait, chance

    def is_completed(self):
        return self.chance.random() < 0.5


class Delayed(Collectives):
    """Reductions that start and complete at other moments on each rank; notes their order."""

    started: ClassVar[list[str]] = []

    def __init__(self, group):
        super().__init__(group)
        self.chance = random.Random(dist.get_rank())

    def reduce_scatter(self, pairs, op, label):
        self.started.append(label)
        time.sleep(self.chance.random() / 100)
        return Late(super().reduce_scatter(pairs, op, label), self.chance)


@pytest.mark.parametrize("hybrid", [False, True])
@on_ranks(4, timeout=60)
def test_a_hook_that_communicates_is_called_at_one_place_whatever_completes_first(hybrid):
    mesh = rank_mesh(2, 2, names=("replicate", "shard"))
    replicas, events = mesh["replicate"].get_group(), Delayed.started
    events.clear()
    model = shard(seeded(blocks=6), mesh=mesh if hybrid else mesh["shard"], transport=Delayed)
    model.set_reduce_scatter_max_input_buffers(2)
    for name, unit in model.named_modules():
        if member_of(unit) is None:
            continue
        unit.set_modules_to_backward_prefetch(
            []
        )  # gathered by need: a rank in a hook keeps its neighbor waiting

        def hook(flat, name=name):
            events.append(f"hook of {name}")
            dist.all_reduce(flat, group=replicas)
            flat.div_(2)

        unit.set_all_reduce_hook(hook)
    for step in range(3):
        loss_of(model, tokens(step)).backward()
        assert_same_gradients(model, plain_backward(seeded(blocks=6), step))
        model.zero_grad()
    found: list[Any] = [None] * 4
    dist.all_gather_object(found, events)
    assert found.count(events) == 4
