"""Parameters that are frozen after sharding do not travel; those that are unfrozen do."""

import gc

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import Body, loss_of, seeded, shard, tokens

from dbuffer import DBuffer, ReduceScatter
from fsdp_runtime import block_policies, fully_shard
from fsdp_runtime._schedule.model import member_of
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives, run_ranks


def freeze(model, trained):
    for name, param in model.named_parameters():
        param.requires_grad_(trained(name))


def is_bias(name):
    return name.endswith("bias")


def mean_gradients(model, ranks, step=0):
    """On one process, of all ranks' batches."""
    for param in model.parameters():
        param.grad = None
    (sum(loss_of(model, tokens(step=step, rank=rank)) for rank in range(ranks)) / ranks).backward()
    return {name: param.grad for name, param in model.named_parameters()}


def assert_gradients(model, wanted):
    for name, param in model.named_parameters():
        if wanted[name] is None:
            assert param.grad is None, name
        else:
            torch.testing.assert_close(param.grad.full_tensor(), wanted[name], rtol=1e-5, atol=1e-7, msg=name)
            assert param.grad.placements == param.placements, name


def train_biases(policy, late):
    """All, then only the biases, then all but the head, then all again."""
    ranks = dist.get_world_size()
    model, alone = shard(seeded(width=16), block_policy=policy), seeded(width=16)
    model.set_copy_gradients_late(late)
    reduced = []
    for step, trained in enumerate(
        (lambda n: True, is_bias, is_bias, lambda n: "head" not in n, lambda n: True)
    ):
        freeze(model, trained)
        freeze(alone, trained)
        for param in model.parameters():
            param.grad = None
        with record_collectives() as record:
            loss_of(model, tokens(step=step)).backward()
        reduced.append(sum(e.bytes_sent for e in record.events if e.kind == "reduce_scatter"))
        assert_gradients(model, mean_gradients(alone, ranks, step))
    return reduced


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_what_is_frozen_after_sharding_is_not_reduced(ranks, late):
    for policy in (None, block_policies.rows(4), block_policies.whole()):
        for reduced in run_ranks(ranks, train_biases, policy, late):
            everything, biases, again, most, at_last = reduced
            assert biases == again <= everything / 4
            assert biases <= most <= everything == at_last


def bytes_of_biases():
    """The figure of a model in which biases are few."""
    model = shard(seeded(width=64, vocab=8))
    freeze(model, is_bias)
    with record_collectives() as record:
        loss_of(model, tokens(vocab=8)).backward()
    return sum(e.bytes_sent for e in record.events if e.kind == "reduce_scatter")


def test_of_the_trained_elements_nothing_but_alignment_is_added():
    trained = 4 * 64  # three blocks and the norm
    for sent in run_ranks(2, bytes_of_biases):
        assert (
            sent <= (trained + 2 * 4 * 8) * 4
        )  # to the one other rank, half of it each, in shards of equal size


@on_ranks(4)
def test_frozen_parameters_and_replicas():
    """Copies over replicas, and an accumulation over microbatches whose sums stay on each replica."""
    mesh = rank_mesh(2, 2, names=("replicate", "shard"))
    model, alone = shard(seeded(), mesh=mesh), seeded()
    freeze(model, is_bias)
    freeze(alone, is_bias)
    model.set_requires_all_reduce(False)
    loss_of(model, tokens(step=0)).backward()
    model.set_requires_all_reduce(True)
    loss_of(model, tokens(step=1)).backward()
    first = mean_gradients(alone, 4, 0)
    first = {name: None if grad is None else grad.clone() for name, grad in first.items()}
    second = mean_gradients(alone, 4, 1)
    assert_gradients(model, {n: None if g is None else g + second[n] for n, g in first.items()})


@on_ranks(2)
def test_frozen_parameters_and_accumulation():
    """Gradients of several backwards without a reduction."""
    model, alone = shard(seeded()), seeded()
    freeze(model, is_bias)
    freeze(alone, is_bias)
    wanted = None
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        loss_of(model, tokens(step=step)).backward()
        found = {n: None if g is None else g.clone() for n, g in mean_gradients(alone, 2, step).items()}
        wanted = (
            found if wanted is None else {n: None if g is None else g + wanted[n] for n, g in found.items()}
        )
    assert_gradients(model, wanted)


@on_ranks(2)
def test_unfreezing_while_gradients_wait_is_an_error_that_names_the_parameter():
    model = shard(seeded())
    freeze(model, is_bias)
    model.set_requires_gradient_sync(False)
    loss_of(model, tokens()).backward()
    model.blocks[0].weight.requires_grad_(True)
    with pytest.raises(
        RuntimeError, match=r"weight in blocks\.0 was unfrozen while gradients of other param"
    ):
        loss_of(model, tokens()).backward()


def on_one_rank_only():
    """A trained parameter that one rank does not use, beside frozen ones."""

    class Sometimes(Body):
        def forward(self, batch, order=None):
            x = self.norm(self.embed(batch))
            return self.blocks[0](x) if dist.get_rank() == 0 else x + 0 * self.blocks[0].bias.sum()

    model = seeded(Sometimes)
    freeze(model, lambda name: name.startswith("blocks.0") or name == "norm.weight")
    model = shard(model)
    freeze(model, lambda name: name in ("blocks.0.weight", "norm.weight"))
    model(tokens()).square().sum().backward()
    return model.blocks[0].weight.grad is not None


def test_a_trained_parameter_without_a_gradient_here_gets_what_others_have():
    assert run_ranks(1, on_one_rank_only) == [True]


@on_ranks(2)
def test_gathered_gradient_memory_is_free_after_backward():
    model = shard(seeded())
    groups = [group for block in model.blocks for group in member_of(block).unit.groups]
    for trained in (is_bias, lambda n: True):
        freeze(model, trained)
        loss_of(model, tokens()).backward()
        assert not any(group.gradients.buffer.gathered.present for group in groups)


@on_ranks(2)
def test_memory_of_gradients_is_dropped_when_other_parameters_are_trained():
    """Two layers of a group are trained in turns; how many buffers of gradients there are after each step."""
    model = fully_shard(seeded())
    counts = []
    for step in range(8):
        freeze(model, lambda name, step=step: f"blocks.{step % 2}" in name or name == "norm.weight")
        loss_of(model, tokens(step=step)).backward()
        gc.collect()
        counts.append(sum(isinstance(item, (DBuffer, ReduceScatter)) for item in gc.get_objects()))
    assert counts[3] == counts[-1], counts
