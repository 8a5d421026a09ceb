import gc
import weakref
from typing import Any

import pytest
import torch
from routing_helpers import Model
from torch import nn

from block_optim import Muon, Recipe
from block_optim.core.policy import BlockRequest, fit_requests
from layout_planner import Elements, Rows, TensorSpec, Tile, Whole, plan


class Layer(nn.Module):
    """Seven matrices of a small Llama layer, one of them large, and two norms."""

    def __init__(self, dim=64, wide=4):
        super().__init__()
        for name in ("wq", "wk", "wv", "wo"):
            setattr(self, name, nn.Linear(dim, dim, bias=False))
        for name in ("up", "gate"):
            setattr(self, name, nn.Linear(dim, wide * dim, bias=False))
        self.down = nn.Linear(wide * dim, dim, bias=False)
        self.norms = nn.Parameter(torch.ones(dim))


def padding(layer, policy, world_size):
    specs = [
        TensorSpec(name, tuple(p.shape), policy(name, p) or Rows(1)) for name, p in layer.named_parameters()
    ]
    layout = plan(specs, world_size)
    return layout.padding / sum(p.numel() for p in layer.parameters()), layout


@pytest.mark.parametrize("units", [None, ["layer"]])
def test_a_policy_does_not_keep_the_unsharded_parameters(units):
    layer: Any = Layer()
    policy = Recipe(layer, units=units and [layer], world_size=units and 2)
    assert policy("wq.weight", layer.wq.weight) == Whole()
    gone = weakref.ref(layer.wq.weight)
    del layer
    gc.collect()
    assert gone() is None
    others = [torch.zeros(64, 64) for _ in range(200)]  # some have the id of a parameter that is gone
    assert all(policy("other", tensor) is None for tensor in others)


def test_without_units_every_matrix_is_kept_whole_and_experts_one_by_one():
    policy = Muon.block_policy()
    assert policy("w", torch.zeros(6, 4)) == Whole()
    assert policy("experts", torch.zeros(3, 6, 4)) == Rows(6)
    assert policy("conv", torch.zeros(8, 4, 3, 3)) == Whole()
    assert policy("bias", torch.zeros(6)) is None
    assert Muon.block_policy(matrices=(2, 2, 2))("w", torch.zeros(6, 4)) == Rows(2)
    assert Muon.block_policy(matrices=(4, 1, 1))("w", torch.zeros(6, 4)) == Rows(6)


@pytest.mark.parametrize("world_size", [2, 4, 7, 64])
def test_with_units_matrices_are_kept_whole_only_where_padding_stays_small(world_size):
    layer = Layer()
    policy = Muon.block_policy([layer], world_size, max_padding=0.05)
    share, _ = padding(layer, policy, world_size)
    floor, _ = padding(layer, lambda name, p: None, world_size)
    everything, _ = padding(layer, Muon.block_policy(), world_size)
    assert share <= floor + 0.05 + 1e-9
    kept = [name for name, p in layer.named_parameters() if policy(name, p) is not None]
    if everything <= floor + 0.05:
        assert len(kept) == 7
    if world_size == 64:
        assert kept == []
        assert everything > 5


def test_blocks_that_an_optimizer_requires_are_never_given_up():
    requests = [
        BlockRequest("matrix", (64, 64), Whole()),
        BlockRequest("codes", (64, 64), Elements(2048), optional=False),
    ]
    assert fit_requests(requests, 64, 0.0) == {"matrix": None, "codes": Elements(2048)}


def test_the_policy_of_a_routed_model_gives_each_parameter_its_algorithms_block():
    model = Model(dim=64, vocabulary=96)
    options: dict[str, Any] = {
        "others": "adamw8bit",
        "overrides": {"qkv": {"matrices": (32,) * 4}, r"up\.weight": "adamw8bit"},
    }
    policy = Recipe(model, adamw={"block": Tile(8, 8)}, **options)
    blocks = {name: policy(name, p) for name, p in model.named_parameters()}
    assert blocks["blocks.0.experts"] == Rows(64)
    assert blocks["blocks.0.qkv.weight"] == Rows(32)
    assert blocks["blocks.0.up.weight"] == Tile(8, 8)
    assert blocks["blocks.0.down.weight"] == blocks["conv.weight"] == Whole()
    assert blocks["to_logits.weight"] == Tile(8, 8)
    assert blocks["tok.weight"] is None  # an embedding, of which fp32 states need no blocks
    assert blocks["blocks.0.norm.weight"] is blocks["blocks.0.qkv.bias"] is None
    spare = Recipe(model, units=[*model.blocks, model], world_size=64, max_padding=0.0, **options)
    weights = dict(model.named_parameters())
    assert spare("", weights["blocks.0.down.weight"]) is None
    assert spare("", weights["blocks.0.up.weight"]) == Tile(1, 256)


def test_parameters_outside_the_units_are_left_alone():
    policy = Muon.block_policy([Layer()], 2)
    assert policy("w", nn.Parameter(torch.zeros(64, 64))) is None
