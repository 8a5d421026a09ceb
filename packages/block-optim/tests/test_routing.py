import copy
from typing import Any

import pytest
import torch
from routing_helpers import Model, full_gradients, make_model
from runs import KINDS, NARROW, SHAPES, Run
from torch import nn

from block_optim import AdamW, AdamW8bit, Mixed, Recipe, Shampoo, mixed_optimizer_for
from block_optim.routing.mixed import ALGORITHMS
from block_optim.routing.routes import routes_of
from layout_planner import Tile


def routed(model, **options):
    return mixed_optimizer_for(model, verbose=False, **options)


def where(model, **overrides):
    return {
        r.names[0]: (r.algorithm, r.reason) for r in routes_of(model, others="adamw", overrides=overrides)
    }


def give(model, step):
    loss, grads = full_gradients(model, step)
    for p, g in zip(model.parameters(), grads, strict=True):
        p.grad = g
    return loss.item()


def test_every_kind_of_parameter_goes_where_the_table_says():
    assert where(Model()) == {
        "tok.weight": ("adamw", "embedding"),
        **{
            f"blocks.{i}.{name}": kind
            for i in range(2)
            for name, kind in {
                "experts": ("muon", "stack"),
                "norm.weight": ("adamw", "vector"),
                "qkv.weight": ("muon", "matrix"),
                "qkv.bias": ("adamw", "vector"),
                "up.weight": ("muon", "matrix"),
                "down.weight": ("muon", "matrix"),
                "router.weight": ("adamw", "vector"),
                "router.bias": ("adamw", "vector"),
            }.items()
        },
        "conv.weight": ("muon", "convolution"),
        "conv.bias": ("adamw", "vector"),
        "final.weight": ("adamw", "vector"),
        "final.bias": ("adamw", "vector"),
        "to_logits.weight": ("adamw", "head"),
    }


@pytest.mark.parametrize(
    ("reason", "names"),
    [
        ("head", ("lm_head", "model.lm_head", "head", "output", "module.output", "unembedded")),
        ("embedding", ("wte", "model.embed_tokens", "tok_embeddings")),
        ("matrix", ("attn.output", "blocks.0.head", "blocks.0.up")),
    ],
)
def test_embeddings_and_heads_are_known_by_name_too(reason, names):
    for name in names:
        model: nn.Module = nn.Linear(4, 6, bias=False)
        for part in reversed(name.split(".")):
            inner, model = model, nn.Module()
            model.add_module(part, inner)
        assert where(model) == {f"{name}.weight": ("muon" if reason == "matrix" else "adamw", reason)}


class Layer(nn.Module):
    """A square projection, and what is no matrix although it has two dimensions."""

    def __init__(self, width):
        super().__init__()
        self.proj = nn.Linear(width, width)
        self.head = nn.Linear(width, 2 * width, bias=False)
        self.expert_bias = nn.Parameter(torch.zeros(2, width))
        self.A_log = nn.Parameter(torch.zeros(width, 4))
        self.filter = nn.Conv1d(width, width, 3, groups=width)


@pytest.mark.parametrize(
    "repeat", [nn.ModuleList, lambda layers: nn.ModuleDict({str(i): m for i, m in enumerate(layers)})]
)
def test_a_block_matrix_with_the_shape_of_an_embedding_is_no_head(repeat):
    width = 8  # the length of the position embedding, as in gpt2-medium
    model = nn.Module()
    model.positions = nn.Embedding(width, width)
    model.tokens = nn.Embedding(2 * width, width)
    model.layers = repeat([Layer(width), Layer(width)])
    model.to_logits = nn.Linear(width, 2 * width)
    model.to_width = nn.Linear(2 * width, 2 * width)
    routes = where(model)
    assert routes["layers.1.proj.weight"] == ("muon", "matrix")
    assert routes["to_logits.weight"] == ("adamw", "head")
    assert routes["to_width.weight"] == ("muon", "matrix")  # as many outputs, but no embedding's shape
    assert routes["layers.1.head.weight"] == ("adamw", "head")  # of a layer that predicts further tokens
    assert routes["layers.1.expert_bias"] == routes["layers.1.A_log"] == ("adamw", "vector")
    assert routes["layers.1.filter.weight"] == ("adamw", "depthwise")


def test_a_tied_head_is_one_parameter_and_an_embedding():
    routes = routes_of(make_model(tied=True), others="adamw", overrides={})
    (tied,) = [r for r in routes if len(r.names) > 1]
    assert tied.names == ("tok.weight", "to_logits.weight")
    assert (tied.algorithm, tied.reason) == ("adamw", "embedding")


def test_frozen_parameters_are_left_out_and_listed():
    model = make_model()
    model.blocks[0].up.weight.requires_grad_(False)
    optimizer = routed(model)
    assert ("blocks.0.up.weight",) in [r.names for r in optimizer.routes if r.algorithm == "none"]
    assert all(p is not model.blocks[0].up.weight for g in optimizer.param_groups for p in g["params"])


@pytest.mark.parametrize("case", ["Mixed", "Mixed 8-bit", *(f"Mixed, {narrow}" for narrow in NARROW)])
def test_mixed_takes_every_algorithm_and_does_what_each_does_alone(case):
    name, _, narrow = case.partition(", ")
    mix = KINDS[name][0]
    options = {"shapes": SHAPES * 2, "lr": 0.1, **NARROW.get(narrow, {})}
    mixed, twin = Run(mix, **options), Run(AdamW, **options)
    own = {key: value for key, value in options.items() if key not in ("shapes", "dtype")}
    groups = mix.groups(list(twin.module.named_parameters()), **own)
    alone = [ALGORITHMS[g.pop("algorithm")](g.pop("params"), **g) for g in groups]
    for number in range(5):
        mixed.step(number)
        twin.give(number)
        for optimizer in alone:
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(mixed.params, twin.params, strict=True))
    saved = mixed.optimizer.state_dict()["state"]
    for i, state in alone[0].state_dict()["state"].items():
        assert all(torch.equal(saved[i][key], value) for key, value in state.items())


def test_options_of_a_whole_algorithm_hold_for_all_its_groups():
    params = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": [p], "algorithm": "adamw"} for p in params]
    mixed = Mixed([{**groups[0], "fused": True}, groups[1]])
    for some in (mixed, copy.deepcopy(mixed)):
        assert isinstance(adamw := some.optimizers["adamw"], AdamW)
        assert adamw.fused


def test_overrides_by_pattern_choose_algorithms_options_and_blocks():
    model = make_model(dim=16)
    overrides: dict[str, Any] = {
        r"qkv\.weight": {"matrices": (16, 8, 8)},
        "blocks.0.up": {"algorithm": "soap", "max_preconditioner_dim": 8},
        "blocks.1.up": "adamw",
        "blocks.0.down": Shampoo,
        "tok": {"lr": 0.5},
    }
    optimizer = routed(model, overrides=overrides)
    group_of = {n: g for g in optimizer.param_groups for n in g["param_names"]}
    assert group_of["blocks.0.qkv.weight"]["matrices"] == (16, 8, 8)
    assert group_of["conv.weight"]["matrices"] == "flatten"
    assert [group_of[f"blocks.{i}.up.weight"]["algorithm"] for i in (0, 1)] == ["soap", "adamw"]
    assert [group_of[f"blocks.{i}.down.weight"]["algorithm"] for i in (0, 1)] == ["shampoo", "muon"]
    assert (group_of["tok.weight"]["algorithm"], group_of["tok.weight"]["lr"]) == ("adamw", 0.5)
    policy, weights = Recipe(model, overrides=overrides), dict(model.named_parameters())
    assert policy("", weights["blocks.0.up.weight"]) == Tile(8, 8)
    assert policy("", weights["blocks.0.down.weight"]) == Tile(16, 48)
    give(model, 0)
    optimizer.step()


def test_vectors_can_be_spared_from_decay():
    optimizer = routed(make_model(), decay_vectors=False)
    for group in optimizer.param_groups:
        vectors = {p.ndim < 2 or min(p.shape) < 2 for p in group["params"]}
        assert len(vectors) == 1
        assert (group["weight_decay"] == 0) == vectors.pop()


def test_one_scheduler_drives_all_groups_and_one_state_dict_holds_all_states():
    model = make_model()
    optimizer = routed(model, lr=0.1, adamw={"lr": 0.01})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.5**k)
    give(model, 0)
    optimizer.step()
    scheduler.step()
    rates = {g["algorithm"]: g["lr"] for g in optimizer.param_groups}
    assert rates == {"muon": 0.05, "adamw": 0.005}
    assert optimizer.optimizers["muon"].param_groups[0]["lr"] == 0.05
    saved = optimizer.state_dict()
    assert len(saved["state"]) == len(list(model.parameters()))
    assert {tuple(sorted(s)) for s in saved["state"].values()} == {
        ("momentum_buffer",),
        ("exp_avg", "exp_avg_sq", "step"),
    }


def test_a_recipe_is_the_policy_and_the_optimizer_with_the_same_options():
    model = make_model(dim=16)
    weights = dict(model.named_parameters())
    recipe = Recipe(AdamW8bit, lr=0.1, block=Tile(8, 8), min_8bit_numel=1)
    assert recipe("up.weight", weights["blocks.0.up.weight"]) == Tile(8, 8)
    assert recipe("norm.weight", weights["blocks.0.norm.weight"]) is None
    (group,) = recipe(model.named_parameters()).param_groups
    assert (group["lr"], group["block"], group["min_8bit_numel"]) == (0.1, "tile:8x8", 1)


@pytest.mark.parametrize(
    "options",
    [
        {"muon": {"matrices": "flatten"}},
        {"muon": {"matrices": "flatten"}, "overrides": {"experts": {"matrices": "auto"}}},
        {"adamw": {"block": Tile(4, 8), "min_8bit_numel": 1}, "others": "adamw8bit", "overrides": {"up": "adamw8bit"}},
        {"adamw": {"min_8bit_numel": 1, "quantize": lambda name, param: "qkv" in name}, "others": "adamw8bit",
         "overrides": {"qkv|down": "adamw8bit"}},
        {"overrides": {"up": {"algorithm": "soap", "max_preconditioner_dim": 8}, "down": Shampoo}},
    ],
)  # fmt: skip
def test_a_recipes_policy_is_that_of_each_groups_algorithm_and_options(options):
    model = make_model(dim=16)
    recipe, weights = Recipe(model, verbose=False, **options), dict(model.named_parameters())
    built: Any = recipe(model)
    for group in built.param_groups:
        kind = type(built.optimizers[group["algorithm"]])
        own = {key: value for key, value in group.items() if key in kind.all_options({})}
        if "adamw" in options and group["algorithm"] == "adamw8bit":
            own["quantize"] = options["adamw"].get("quantize", kind.all_options({})["quantize"])
        policy = kind.block_policy(**own)
        for name in group["param_names"]:
            assert recipe(name, weights[name]) == policy(name, weights[name]), name
