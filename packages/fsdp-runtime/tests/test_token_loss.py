"""Losses by tokens: ranks and microbatches with different numbers of tokens give what one process gives."""

from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import Body, assert_same_gradients, llama, seeded, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_runtime import fully_shard
from fsdp_runtime.token_loss import TokenLoss, count_tokens
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives, simulated_ranks

IGNORED, VOCAB, LENGTH = -100, 12, 9
EXACT: Any = {"rtol": 1e-6, "atol": 1e-12}


def batch(step, rank, part):
    """Tokens (2, LENGTH) and labels, of which a random number is not ignored; in the first step rank 1 has none."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    text = torch.randint(VOCAB, (2, LENGTH), generator=generator)
    number = 0 if (step, rank) == (0, 1) else torch.randint(2 * LENGTH, (), generator=generator)
    kept = torch.randperm(2 * LENGTH, generator=generator).view(2, LENGTH) < number
    return text, torch.where(kept, (text * 5 + 1) % VOCAB, IGNORED)


def sum_of_losses(model, text, labels):
    return nn.functional.cross_entropy(model(text).flatten(0, 1), labels.flatten(), reduction="sum")


def one_process(step, ranks, parts):
    """Gradients and mean loss of a plain model that has all tokens."""
    model = seeded(Body).double()
    batches = [batch(step, rank, part) for rank in range(ranks) for part in range(parts)]
    number = sum(int(count_tokens(labels)) for _, labels in batches)
    loss = torch.stack([sum_of_losses(model, *each) for each in batches]).sum() / number
    loss.backward()
    return model, loss.detach(), number


same_gradients: Any = partial(assert_same_gradients, **EXACT)


def accumulated(model, step, batches, sync=None):
    """Backward of all microbatches; returns their losses. `sync` is called with whether a microbatch is the last."""
    losses = []
    for number, (text, labels) in enumerate(batches):
        if sync is not None:
            sync(number == len(batches) - 1)
        losses.append(step.loss(sum_of_losses(model, text, labels)))
        losses[-1].backward()
    return losses


def ragged_steps(mesh=None, parts=2, **ways: Any):
    """Steps with and without accumulation in the shards; each way of accumulating is `(model, is_last) -> None`."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = shard(seeded(Body).double(), mesh=mesh)
    token_loss = TokenLoss(model)
    for number, way in enumerate([None, *ways.values()]):
        sync = None if way is None else partial(way, model)
        batches = [batch(number, rank, part) for part in range(parts)]
        step = token_loss.step(count_tokens(labels) for _, labels in batches)
        losses = accumulated(model, step, batches, sync)
        plain, loss, total = one_process(number, ranks, parts)
        assert step.total == total
        same_gradients(model, plain)
        mean = torch.stack(losses).detach().sum()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean, loss, **EXACT)
        model.zero_grad()


@on_ranks(3)
def test_gradients_and_loss_are_those_of_one_process_whatever_tokens_a_rank_has():
    ragged_steps(no_sync=lambda model, is_last: model.set_requires_gradient_sync(is_last))


@on_ranks(4)
def test_tokens_of_replicas_count_too():
    ragged_steps(
        rank_mesh(2, 2, names=("replicate", "shard")),
        no_sync=lambda model, is_last: model.set_requires_gradient_sync(is_last),
        no_all_reduce=lambda model, is_last: model.set_requires_all_reduce(is_last),
    )


@on_ranks(3)
def test_losses_of_single_tokens_are_summed_in_fp32_with_a_small_all_reduce():
    token_loss = TokenLoss(shard(seeded(Body)))
    step = token_loss.step([3])
    losses = torch.full((2, 3), 1.0 + 2**-7, dtype=torch.bfloat16)
    assert step.loss(losses).dtype == torch.float32
    assert step.loss(losses).item() == pytest.approx(6 * (1 + 2**-7) / 9, rel=1e-6)
    with record_collectives() as counted:
        step = token_loss.step([4, torch.tensor(5)])
    assert counted.kinds == ["all_reduce"]
    assert counted.bytes_sent < 64
    with pytest.raises(RuntimeError, match="can't be cast"):
        token_loss.step([2.5])  # type: ignore[list-item]


def test_one_process_without_ranks_counts_its_own_tokens():
    model = seeded(Body).double()
    batches = [batch(0, 0, part) for part in range(2)]
    step = TokenLoss(model).step(count_tokens(labels) for _, labels in batches)
    losses = accumulated(model, step, batches)
    plain, loss, _ = one_process(0, 1, 2)
    same_gradients(model, plain)
    torch.testing.assert_close(torch.stack(losses).detach().sum(), loss, **EXACT)


def test_tokens_of_a_model_without_units_are_counted_on_the_meshs_device():
    with simulated_ranks(4):
        loss = TokenLoss(nn.Linear(2, 2), mesh=init_device_mesh("meta", (4,)))
        assert loss.step([torch.ones((), dtype=torch.int64, device="meta")]).tokens.is_meta


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@on_ranks(3)
def test_a_model_of_transformers_takes_the_total():
    model, plain = llama(num_hidden_layers=1).double(), llama(num_hidden_layers=1).double()
    fully_shard(model.model.layers[0])
    fully_shard(model)
    batches = [batch(0, rank, 0) for rank in range(3)]
    text, labels = batches[dist.get_rank()]
    step = TokenLoss(model).step([count_tokens(labels[:, 1:])])
    model(input_ids=text, labels=labels, num_items_in_batch=step.total).loss.backward()
    for text, labels in batches:
        logits = plain(input_ids=text).logits[:, :-1]
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        (total / step.total).backward()
    for param, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        away = (param.grad.full_tensor() - wanted.grad).abs().max() / wanted.grad.abs().max()
        assert away < 1e-5  # transformers takes the loss of fp32 logits
