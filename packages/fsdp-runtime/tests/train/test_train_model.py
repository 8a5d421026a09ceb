"""The model is what its docstrings say."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from fsdp_runtime.train import PRESETS, ModelConfig, Transformer
from fsdp_runtime.train.model import (
    MixtureOfExperts,
    balance_loss,
    flops_per_token,
    init_parameter,
    rope_tables,
    rotate,
)


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
def test_every_parameter_gets_a_gradient(preset):
    model, text = made(PRESETS[preset]), tokens()
    logits, aux = model(text)
    (F.cross_entropy(logits.flatten(0, 1), text.flatten()) + aux).backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]


@pytest.mark.parametrize("preset", ["tiny", "tiny-moe"])
def test_checkpointing_changes_no_gradient(preset):
    found = []
    for checkpointing in (False, True):
        model, text = made(PRESETS[preset], checkpointing=checkpointing), tokens()
        logits, aux = model(text)
        (F.cross_entropy(logits.flatten(0, 1), text.flatten()) + aux).backward()
        found.append([p.grad for p in model.parameters()])
    for plain, recomputed in zip(*found, strict=True):
        assert torch.equal(plain, recomputed)


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


def test_an_expert_that_no_token_chooses_gets_a_zero_gradient():
    config = PRESETS["tiny-moe"]
    experts = MixtureOfExperts(config)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.1)
        experts.router.weight.zero_()
        experts.router.weight[:2] = 1.0  # positive inputs go to the first two
    experts(torch.rand(1, 4, config.dim))[0].sum().backward()
    gradient = experts.w_gate.grad
    assert gradient is not None
    assert gradient[2:].abs().sum() == 0
    assert gradient[:2].abs().sum() > 0


def test_the_balancing_loss_is_one_when_even_more_when_not_and_does_not_depend_on_the_batch():
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


def test_a_tied_head_is_the_embedding():
    model = made(PRESETS["tiny"])
    assert model.head.weight is model.embed.weight
    assert made(PRESETS["tiny-moe"]).head.weight is not made(PRESETS["tiny-moe"]).embed.weight


def test_flops_of_a_token_are_six_per_weight_used_and_attentions():
    config = ModelConfig(
        vocab_size=10, dim=8, num_layers=1, num_heads=2, num_kv_heads=1, ff_dim=16, tied=False
    )
    weights = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16 + 8 * 10
    assert flops_per_token(config, 32) == 6 * weights + 12 * 8 * 32


def test_a_fresh_model_predicts_all_tokens_alike():
    model, text = made(PRESETS["tiny"]), tokens()
    targets = text.flip(0, 1)
    assert F.cross_entropy(model(text)[0].flatten(0, 1), targets.flatten()).item() == pytest.approx(
        math.log(256), rel=0.02
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 30}, "channels a head"),
        ({"num_kv_heads": 3}, "do not divide by 3"),
        ({"num_experts": 1}, "1 experts"),
        ({"num_layers": 0}, "num_layers is 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PRESETS["tiny"], **changes)


@pytest.mark.parametrize("name", ["tiny", "tiny-moe", "small", "small-moe", "1b-moe"])
def test_a_presets_number_of_parameters_is_that_of_its_model(name):
    with torch.device("meta"):
        model = Transformer(PRESETS[name])
    assert PRESETS[name].num_parameters == sum(p.numel() for p in model.parameters())
