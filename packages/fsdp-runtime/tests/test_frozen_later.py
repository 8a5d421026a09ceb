"""Parameters that are frozen after sharding do not travel; those that are unfrozen do."""

import gc

from runtime_helpers import assert_same_gradients, loss_of, plain_backward, seeded, shard, tokens

from dbuffer import DBuffer, ReduceScatter
from fsdp_runtime import block_policies, fully_shard
from ragged_shard.testing import on_ranks, record_collectives


def freeze(model, trained):
    for name, param in model.named_parameters():
        param.requires_grad_(trained(name))


def is_bias(name):
    return name.endswith("bias")


def train_biases(policy, late):
    """All, then only the biases, then all but the head, then all again."""
    model, alone = shard(seeded(width=16), block_policy=policy), seeded(width=16)
    model.set_copy_gradients_late(late)
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


@on_ranks(3)
def test_what_is_frozen_after_sharding_is_not_reduced():
    for policy, late in ((None, False), (block_policies.rows(4), True), (block_policies.whole(), False)):
        everything, biases, again, most, at_last = train_biases(policy, late)
        assert biases == again <= everything / 4
        assert biases <= most <= everything == at_last


@on_ranks(2)
def test_of_the_trained_elements_nothing_but_alignment_is_added():
    model = shard(seeded(width=64, vocab=8))  # biases are few
    freeze(model, is_bias)
    with record_collectives() as record:
        loss_of(model, tokens(vocab=8)).backward()
    sent = sum(e.bytes_sent for e in record.events if e.kind == "reduce_scatter")
    trained = 4 * 64  # three blocks and the norm
    assert sent <= (trained + 2 * 4 * 8) * 4  # half of it to the one other rank, in shards of equal size


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
