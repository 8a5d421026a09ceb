"""A unit around others frees and reduces its large children in backward as soon as they are done with."""

from unittest import mock

import pytest
import torch
from runtime_helpers import Body, Watch, assert_same_gradients, loss_of, plain_backward, seeded, shard, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_runtime._plan import group as _plan
from fsdp_runtime._schedule.model import member_of
from ragged_shard.testing import on_ranks, record_collectives


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


def children_from(elements):
    """Inside, children of this many elements have a separate buffer and reduction."""
    return mock.patch.object(_plan, "MIN_CHILD", elements)


def step(make=Watched, children=1, **attributes):
    """What was seen in a step, whose gradients are those of one process; and the number of reductions."""
    model, reference = seeded(make), seeded(make)
    for name, value in attributes.items():
        setattr(model, name, value)
        setattr(reference, name, value)
    with children_from(children), record_collectives() as record:
        shard(model)
        loss_of(model, tokens()).backward()
    reference.look = lambda: None
    assert_same_gradients(model, plain_backward(reference), atol=1e-7)
    return model.seen, record.kinds.count("reduce_scatter")


@on_ranks(3)
def test_the_heads_memory_is_free_while_the_blocks_run_backward():
    assert step()[0] == [{"embed.weight"}]
    assert "head.weight" in step(detached=True)[0][0]
    seen, reductions = step(children=1 << 18)  # reduced together, at the end
    assert seen == [{"embed.weight", "norm.weight", "norm.bias", "head.weight"}]
    assert reductions == 4  # three blocks and the root


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


class Scaled(Body):
    """Multiplies what the embedding gives, and if it is told to, the result."""

    def __init__(self, **options):
        super().__init__(**options)
        self.scales = nn.Module()
        self.scales.first, self.scales.last = (nn.Parameter(torch.ones(())) for _ in range(2))

    def forward(self, batch, last=False):
        x = torch.tanh(self.blocks[0](self.embed(batch) * self.scales.first))
        x = self.head(self.norm(x))
        return x * self.scales.last if last else x


@pytest.mark.parametrize("frozen", [False, True])
@on_ranks(2)
@children_from(1)
def test_nothing_is_freed_that_backward_needs_after_its_last_gradient(frozen):
    """Which is not the last if a parameter is frozen, or if only the last microbatch uses it."""
    model, alone = shard(seeded(Scaled, blocks=1)), seeded(Scaled, blocks=1)
    for each in (model, alone):
        each.scales.first.requires_grad_(not frozen)
    for microbatch in (1,) if frozen else (0, 1):
        model.set_requires_gradient_sync(microbatch == 1)
        loss_of(model, tokens(microbatch), last=microbatch == 1).backward()
        for rank in range(2):
            (loss_of(alone, tokens(microbatch, rank=rank), last=microbatch == 1) / 2).backward()
    assert_same_gradients(model, alone)


@on_ranks(2)
def test_a_child_used_in_several_reentrant_checkpoints_is_kept_and_summed():
    step(make=InRuns)


@on_ranks(2)
@children_from(1)
def test_a_second_backward_through_one_graph_gathers_what_the_first_freed():
    model = shard(seeded(Body), reshard_after_forward=True)
    loss = loss_of(model, tokens())
    loss.backward(retain_graph=True)
    loss.backward()
    assert_same_gradients(model, plain_backward(seeded(Body)), scale=2)


@on_ranks(2)
@children_from(1)
def test_what_backward_has_freed_early_is_gathered_again_if_it_is_asked_for():
    model, alone = shard(seeded(Watched)), seeded(Watched)
    weights: list[torch.Tensor] = []

    def look() -> None:
        model.unshard()
        weights.append(model.head.weight.detach().clone())

    model.look, alone.look = look, lambda: None
    loss_of(model, tokens()).backward()
    assert torch.equal(weights[0], alone.head.weight)
    assert_same_gradients(model, plain_backward(alone), atol=1e-7)


@on_ranks(1)
@children_from(1)
def test_own_buffers_change_neither_names_nor_their_order():
    model, plain = shard(seeded(Body)), Body()
    assert len(member_of(model).unit.groups) == 3
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]


class Sometimes(Watched):
    """The head is used on rank 0 only."""

    def forward(self, batch, order=None):
        x = Watch.apply(self.embed(batch), self.look)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(self.norm(x)) if torch.distributed.get_rank() == 0 else self.norm(x)


@on_ranks(3)
@children_from(1)
def test_with_unused_parameters_all_ranks_reduce_at_the_end():
    model = shard(seeded(Sometimes))
    model.set_reduce_scatter_unused_params(True)
    model(tokens()).square().sum().backward()
    alone = seeded(Watched)
    alone.look = lambda: None
    alone(tokens(rank=0)).square().sum().backward()
    assert torch.allclose(model.head.weight.grad.full_tensor(), alone.head.weight.grad / 3, atol=1e-6)
