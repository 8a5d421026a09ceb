"""How the training model's experts are shared out; `tests/parallel` trains them."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fsdp_runtime.memory import fake_tensors
from fsdp_runtime.train.model import ModelConfig, Transformer
from fsdp_runtime.train.parallel.experts import apply_expert_parallel
from ragged_shard.testing import rank_mesh, simulated_ranks


def model_of(experts: int) -> Any:
    config = ModelConfig(
        vocab_size=16,
        dim=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        ff_dim=12,
        num_experts=experts,
        tied=False,
    )
    model = Transformer(config)
    for number, param in enumerate(model.parameters()):
        if not param.is_meta:
            nn.init.normal_(param, generator=torch.Generator().manual_seed(number))
    return model


def mesh_of(*shape: int) -> Any:
    return rank_mesh(*shape, names=("efsdp", "ep")[-len(shape) :])


def test_each_rank_keeps_its_experts_under_the_same_names() -> None:
    with simulated_ranks(4, rank=3):
        names = [name for name, _ in model_of(4).named_parameters()]
        model, whole = model_of(4), model_of(4)
        experts = apply_expert_parallel(model, mesh_of(2, 2)["ep"])
        assert [name for name, _ in model.named_parameters()] == names
        layer = model.blocks[0].ff
        assert experts == {layer.w_gate, layer.w_up, layer.w_down}
        for name in ("w_gate", "w_up", "w_down"):
            weight = getattr(layer, name)
            assert isinstance(weight, DTensor)
            assert weight.placements == (Shard(0),)
            assert torch.equal(weight.to_local(), getattr(whole.blocks[0].ff, name)[2:])


def test_experts_are_shared_out_on_meta_too() -> None:
    with simulated_ranks(4, rank=1):
        with torch.device("meta"):
            model = model_of(4)
        apply_expert_parallel(model, mesh_of(4))
        weight = model.blocks[0].ff.w_gate
        assert weight.is_meta
        assert weight.to_local().shape == (1, 12, 8)


def test_a_step_on_fake_tensors_issues_the_same_all_to_alls() -> None:
    with simulated_ranks(4, rank=1) as simulation:
        mesh = mesh_of(4)
        before = len(simulation.calls)
        with fake_tensors():
            model = model_of(4)
            apply_expert_parallel(model, mesh)
            logits, aux = model(torch.zeros(2, 6, dtype=torch.long))
            (logits.sum() + aux).backward()
        assert len(simulation.calls) - before == 5


def test_what_cannot_be_shared_out_is_refused_by_name() -> None:
    with simulated_ranks(4):
        with pytest.raises(ValueError, match=r"blocks.0.ff has 6 experts, which 4 ranks .* do not divide"):
            apply_expert_parallel(model_of(6), mesh_of(4))
        with pytest.raises(ValueError, match="ep_mesh has 2 axes"):
            apply_expert_parallel(model_of(4), mesh_of(2, 2))
        with pytest.raises(ValueError, match="Sequential has no layer of experts"):
            apply_expert_parallel(nn.Sequential(nn.Linear(2, 2)), mesh_of(4))
