"""How gradients are scaled and reduced, and which ones."""

import gc
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
    assert_same_gradients,
    full,
    loss_of,
    plain_backward,
    same_bits,
    seeded,
    shard,
    tokens,
)
from torch import nn
from torch.distributed.tensor import Partial, Replicate

from dbuffer import DBuffer, ReduceScatter
from dbuffer.transport import Collectives
from fsdp_runtime import block_policies, fully_shard
from fsdp_runtime._grads.scaling import ReduceOptions, scaling
from fsdp_runtime._schedule.model import member_of
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives


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
                model.zero_grad()  # of units that were reduced before
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


def unsharded(lender):
    lender.unshard()
    return lender.weight


def called(lender):
    return lender(torch.eye(8)).t()


def summed(lender):
    weight = lender.weight
    full = weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)
    return full / dist.get_world_size() + (1 - 1 / dist.get_world_size()) * full.detach()


@pytest.mark.parametrize("remedy", [unsharded, called, summed])
@on_ranks(2)
def test_what_the_refusal_names_has_the_gradients_of_one_process(remedy):
    model, alone = borrowing(remedy), seeded(Borrower)
    for step in range(2):
        loss_of_borrower(model, step).backward()
        for rank in range(2):
            (loss_of_borrower(alone, step, rank) / 2).backward()
        assert_same_gradients(model, alone)


@pytest.mark.parametrize("inside", [True, False])
@on_ranks(2)
def test_a_regularizer_of_gathered_parameters_has_its_gradient(inside):
    terms = []

    def borrow(lender):
        if inside:
            terms.append(lender.weight.full_tensor(grad_placements=[Replicate()]).square().sum())
        return called(lender)

    model = borrowing(borrow)
    loss = 0 * loss_of_borrower(model)
    if not inside:
        terms.append(model.lender.weight.full_tensor().square().sum())
    (loss + terms[0]).backward()
    torch.testing.assert_close(full(model.lender.weight.grad), 2 * full(model.lender.weight))


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


def freeze(model, trained):
    for name, param in model.named_parameters():
        param.requires_grad_(trained(name))


def is_bias(name):
    return name.endswith("bias")


def train_biases(policy):
    """All, then only the biases, then all but the head, then all again."""
    model, alone = shard(seeded(width=16), block_policy=policy), seeded(width=16)
    reduced = []
    for step, trained in enumerate(
        (lambda n: True, is_bias, is_bias, lambda n: "head" not in n, lambda n: True)
    ):
        for each in (model, alone):
            freeze(each, trained)
            each.zero_grad()
        with record_collectives() as record:
            loss_of(model, tokens(step=step)).backward()
        reduced.append(sum(e.bytes_sent for e in record.events if e.kind == "reduce_scatter"))
        assert_same_gradients(model, plain_backward(alone, step), atol=1e-7)
        for name, param in model.named_parameters():
            assert param.grad is None or param.grad.placements == param.placements, name
    return reduced


class Ridge(torch.autograd.Function):
    """Half of a weight's squares, whose gradient is the weight's own memory."""

    @staticmethod
    def forward(ctx, weight):
        ctx.save_for_backward(weight)
        return weight.square().sum() / 2

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0].detach()


class Penalty(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        return x + Ridge.apply(self.weight)


@on_ranks(2)
def test_a_gradient_in_memory_that_is_freed_before_the_reduction_keeps_its_values():
    torch.manual_seed(0)
    model: Any = nn.Sequential(Penalty(), Penalty(), Penalty())
    expected = [layer.weight.detach().clone() for layer in model]
    for layer in model:
        fully_shard(layer)
    fully_shard(model)(torch.zeros(1)).sum().backward()
    for layer, weight in zip(model, expected, strict=True):
        assert torch.equal(full(layer.weight.grad), weight)


@on_ranks(3)
def test_what_is_frozen_after_sharding_is_not_reduced():
    for policy in (None, block_policies.rows(4), block_policies.whole()):
        everything, biases, again, most, at_last = train_biases(policy)
        assert biases == again <= everything / 4
        assert biases <= most <= everything == at_last


@on_ranks(2)
def test_memory_of_gradients_is_freed_when_other_parameters_are_trained():
    model = fully_shard(seeded())
    counts = []
    for step in range(6):
        freeze(model, lambda name, step=step: f"blocks.{step % 2}" in name or name == "norm.weight")
        loss_of(model, tokens(step=step)).backward()
        gc.collect()
        counts.append(sum(isinstance(item, (DBuffer, ReduceScatter)) for item in gc.get_objects()))
    assert counts[3] == counts[-1], counts
