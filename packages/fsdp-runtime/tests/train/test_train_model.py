"""The transformer, its experts and its optimizers."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_runtime.train import PRESETS
from fsdp_runtime.train.model import (
    MixtureOfExperts,
    Transformer,
    balance_loss,
    init_parameter,
    rope_tables,
    rotate,
)
from fsdp_runtime.train.optimizers import decay_groups, make_optimizer


def made(config, **options):
    model = Transformer(config, **options)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            init_parameter(config, name, parameter, torch.Generator().manual_seed(len(name)))
    return model


def tokens(rows=3, length=16):
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("preset", ["tiny", "tiny-moe"])
def test_a_token_does_not_see_what_comes_after_it(preset):
    model, text = made(PRESETS[preset]), tokens()
    changed = text.clone()
    changed[:, 10:] = 7
    torch.testing.assert_close(model(text)[0][:, :10], model(changed)[0][:, :10])
    assert not torch.allclose(model(text)[0][:, 10:], model(changed)[0][:, 10:])


@pytest.mark.parametrize("preset", ["tiny", "tiny-moe"])
def test_every_parameter_gets_a_gradient_which_checkpointing_does_not_change(preset):
    found = []
    for checkpointing in (False, True):
        model, text = made(PRESETS[preset], checkpointing=checkpointing), tokens()
        logits, aux = model(text)
        (F.cross_entropy(logits.flatten(0, 1), text.flatten()) + aux).backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, plain in found[0].items():
        assert plain is not None, name
        assert torch.equal(plain, found[1][name]), name


def test_experts_are_the_weighted_sum_of_each_tokens_choices():
    config = dataclasses.replace(PRESETS["tiny-moe"], num_experts=3)
    experts, x = MixtureOfExperts(config), torch.randn(2, 5, config.dim)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    expected = torch.zeros_like(x)
    for b in range(2):
        for t in range(5):
            weight, chosen = experts.router(x[b, t]).softmax(0).topk(config.top_k)
            for w, e in zip(weight / weight.sum(), chosen, strict=True):
                hidden = F.silu(experts.w_gate[e] @ x[b, t]) * (experts.w_up[e] @ x[b, t])
                expected[b, t] += w * (experts.w_down[e] @ hidden)
    torch.testing.assert_close(experts(x)[0], expected)


def test_the_balancing_loss_is_one_if_even_more_if_not_for_any_batch():
    even = torch.full((4, 8, 4), 0.25)
    chosen = torch.arange(8).repeat(4, 1)[..., None] % 4
    assert balance_loss(even, chosen).item() == pytest.approx(1.0)
    skewed = torch.tensor([0.7, 0.1, 0.1, 0.1]).expand(4, 8, 4)
    assert balance_loss(skewed, torch.zeros(4, 8, 1, dtype=torch.int64)).item() == pytest.approx(2.8)
    probs = torch.rand(4, 8, 4).softmax(-1)
    picked = probs.topk(2, dim=-1).indices
    halves = [balance_loss(probs[part], picked[part]) for part in (slice(0, 2), slice(2, 4))]
    torch.testing.assert_close(balance_loss(probs, picked), sum(halves) / 2)


def test_rotation_keeps_lengths_and_scores_depend_on_distance():
    cos, sin = rope_tables(32, 8, 10_000.0, torch.device("cpu"))
    q, k = torch.randn(8), torch.randn(8)
    turned_q, turned_k = (rotate(x.expand(1, 1, 32, 8), cos, sin)[0, 0] for x in (q, k))
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(32))
    scores = turned_q @ turned_k.T
    torch.testing.assert_close(scores[5, 3], scores[25, 23])


class Model(nn.Module):
    """An embedding and a head with a row for each of 50 tokens, a matrix that has none, a vector."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 50, bias=False)


def names(groups):
    return [[name for name, _ in group["params"]] for group in groups]


def test_vectors_are_not_decayed_and_soap_rotates_no_rows_of_tokens():
    model = Model()
    decayed = decay_groups(model, 0.1)
    assert names(decayed) == [["embed.weight", "inner.weight", "head.weight"], ["inner.bias"]]
    assert [group["weight_decay"] for group in decayed] == [0.1, 0.0]
    groups = decay_groups(model, 0.1, rotates=True)
    assert names(groups) == [["inner.weight"], ["embed.weight", "head.weight"], ["inner.bias"]]
    assert [group.get("diagonal_above") for group in groups] == [None, 49, None]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]
    for name, number in (("soap", 3), ("shampoo", 2)):
        assert len(make_optimizer(name, Model(), lr=None, weight_decay=0.1).param_groups) == number
