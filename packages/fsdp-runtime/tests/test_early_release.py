"""A unit around others frees and reduces its large children in backward as soon as they are done with."""

from contextlib import contextmanager

import pytest
import torch
from runtime_helpers import Body, Watch, loss_of, seeded, shard, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_runtime._plan import group as _plan
from fsdp_runtime._schedule.model import member_of
from ragged_shard.testing import on_ranks, record_collectives, run_ranks


class Watched(Body):
    """Looks, in the middle of backward, at which of its own parameters have memory."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []
        self.detached = False

    def look(self):
        unit = member_of(self).unit
        self.seen.append({p.name for g in unit.groups if g.buffer.gathered.present for p in g.params})

    def forward(self, batch, order=None):
        x = self.embed(batch)
        if self.detached:  # used without a gradient, and needed after the head's gradient is there
            x = x + nn.functional.linear(x, self.head.weight.detach()).sum(-1, keepdim=True)
        x = Watch.apply(x, self.look)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(self.norm(x))


@contextmanager
def children_from(elements):
    """Inside, children of so many elements have a buffer of their own. Ranks live on, so it is set back."""
    before, _plan.MIN_CHILD = _plan.MIN_CHILD, elements
    try:
        yield
    finally:
        _plan.MIN_CHILD = before


def step(make=Watched, children=1, **attributes):
    with children_from(children):
        return step_inside(make, **attributes)


def step_inside(make, **attributes):
    model, reference = seeded(make), seeded(make)
    shard(model)
    for name, value in attributes.items():
        setattr(model, name, value)
        setattr(reference, name, value)
    with record_collectives() as record:
        loss_of(model, tokens()).backward()
    size = torch.distributed.get_world_size()
    reference.look = lambda: None
    (sum(loss_of(reference, tokens(rank=r)) for r in range(size)) / size).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p.grad.full_tensor(), q.grad, rtol=1e-5, atol=1e-7)
    return model.seen, record.kinds.count("reduce_scatter")


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_heads_memory_is_free_while_the_blocks_run_backward(ranks):
    for seen, _ in run_ranks(ranks, step):
        assert seen == [{"embed.weight"}]


def test_small_children_stay_to_the_end_and_are_reduced_together():
    for seen, reductions in run_ranks(2, step, children=1 << 18):
        assert seen == [{"embed.weight", "norm.weight", "norm.bias", "head.weight"}]
        assert reductions == 4  # three blocks and the root


def test_what_autograd_still_holds_is_not_freed():
    for seen, _ in run_ranks(2, step, detached=True):
        assert "head.weight" in seen[0]


class InRuns(Body):
    """One child of the root in several checkpointed regions, each a run of autograd inside the run."""

    seen = ()

    def look(self):
        raise NotImplementedError

    def forward(self, batch, order=None):
        x = self.embed(batch).requires_grad_()
        for block in self.blocks:
            x = checkpoint(lambda y: self.norm(y) * 2, block(x), use_reentrant=True)
        return self.head(x)


def test_a_child_used_in_several_reentrant_checkpoints_is_kept_and_summed():
    run_ranks(2, step, make=InRuns)


def second_backward(model):
    loss = loss_of(model, tokens())
    loss.backward(retain_graph=True)
    once = [p.grad.full_tensor() for p in model.parameters()]
    loss.backward()
    for p, one in zip(model.parameters(), once, strict=True):
        assert torch.allclose(p.grad.full_tensor(), 2 * one)


@on_ranks(2)
def test_a_second_backward_gathers_what_the_first_freed():
    """A second backward through the same graph needs what the first one freed."""
    with children_from(1):
        model = shard(seeded(Body), reshard_after_forward=True)
        second_backward(model)


def in_own_buffers():
    with children_from(1):
        model = shard(seeded(Body))
    assert len(member_of(model).unit.groups) == 3
    return list(model.state_dict()), [name for name, _ in model.named_parameters()]


def test_own_buffers_change_neither_names_nor_their_order():
    plain = Body()
    assert run_ranks(1, in_own_buffers)[0] == (
        list(plain.state_dict()),
        [name for name, _ in plain.named_parameters()],
    )


class Sometimes(Watched):
    """The head is used on rank 0 only."""

    def forward(self, batch, order=None):
        x = Watch.apply(self.embed(batch), self.look)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(self.norm(x)) if torch.distributed.get_rank() == 0 else self.norm(x)


def use_on_one_rank(model):
    model.set_reduce_scatter_unused_params(True)
    model(tokens()).square().sum().backward()
    alone = seeded(Watched)
    alone.look = lambda: None
    alone(tokens(rank=0)).square().sum().backward()
    assert torch.allclose(model.head.weight.grad.full_tensor(), alone.head.weight.grad / 3, atol=1e-6)


@on_ranks(3)
def test_with_unused_parameters_all_ranks_reduce_at_the_end():
    with children_from(1):
        model = shard(seeded(Sometimes))
        use_on_one_rank(model)
