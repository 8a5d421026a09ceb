"""Sharing experts out: what each rank has, and what is refused. The cases train with it."""

from typing import Any

import pytest
import torch
from experts import apply_expert_parallel
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fsdp_runtime.train.model import ModelConfig, Transformer
from ragged_shard.testing import rank_mesh, simulated_ranks


def model_of(experts: int) -> Any:
    sizes = {"vocab_size": 16, "dim": 8, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "ff_dim": 12}
    model = Transformer(ModelConfig(**sizes, num_experts=experts, tied=False))
    for number, param in enumerate(model.parameters()):
        if not param.is_meta:
            nn.init.normal_(param, generator=torch.Generator().manual_seed(number))
    return model


def mesh_of(*shape: int) -> Any:
    return rank_mesh(*shape, names=("efsdp", "ep")[-len(shape) :])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_each_rank_keeps_its_experts_under_the_same_names(device: str) -> None:
    with simulated_ranks(4, rank=3):
        with torch.device(device):
            model, whole = model_of(4), model_of(4)
        experts = apply_expert_parallel(model, mesh_of(2, 2)["ep"])
        assert [name for name, _ in model.named_parameters()] == [
            name for name, _ in whole.named_parameters()
        ]
        layer = model.blocks[0].ff
        assert experts == {layer.w_gate, layer.w_up, layer.w_down}
        for name in ("w_gate", "w_up", "w_down"):
            weight, own = getattr(layer, name), getattr(whole.blocks[0].ff, name)[2:]
            assert isinstance(weight, DTensor)
            assert weight.placements == (Shard(0),)
            assert (weight.to_local().shape, weight.device.type) == (own.shape, device)
            assert device == "meta" or torch.equal(weight.to_local(), own)


def test_what_cannot_be_shared_out_is_refused_by_name() -> None:
    with simulated_ranks(4):
        with pytest.raises(ValueError, match=r"blocks.0.ff has 6 experts, which 4 ranks .* do not divide"):
            apply_expert_parallel(model_of(6), mesh_of(4))
        with pytest.raises(ValueError, match="ep_mesh has 2 axes"):
            apply_expert_parallel(model_of(4), mesh_of(2, 2))
        with pytest.raises(ValueError, match="Sequential has no layer of experts"):
            apply_expert_parallel(nn.Sequential(nn.Linear(2, 2)), mesh_of(4))
