"""Tiny transformers models, from configs alone, under any implementation of fully_shard."""

import importlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from parity_runs import SYSTEMS

from ragged_shard.testing import rank_mesh

SMALL = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaConfig": {"tie_word_embeddings": True},
    "Qwen3MoeConfig": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "MixtralConfig": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "GptOssConfig": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def build(name: str) -> nn.Module:
    """The model of a config, eager attention, the same values on every rank."""
    import transformers

    config = getattr(transformers, name)(**SMALL, **CONFIGS[name], attn_implementation="eager")
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def train(system: str, name: str, steps: int = 3) -> tuple[float, float]:
    """Distances of losses and parameters from one process. The optimizer is HF's default, gradients are clipped."""
    fsdp = importlib.import_module(SYSTEMS[system])
    reference, model = build(name), build(name)
    mesh = rank_mesh()
    for layer in model.model.layers:
        fsdp.fully_shard(layer, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (reference, model)]
    worst = 0.0
    for step in range(steps):
        whole = torch.randint(61, (12, 10), generator=torch.Generator().manual_seed(step))
        wanted = reference(input_ids=whole, labels=whole).loss
        part = whole.chunk(dist.get_world_size())[dist.get_rank()]
        found = model(input_ids=part, labels=part).loss
        wanted.backward()
        found.backward()
        for m in (reference, model):
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        total = found.detach().double()
        dist.all_reduce(total)
        worst = max(worst, abs(total.item() / dist.get_world_size() / wanted.item() - 1))
    model.eval()
    with torch.no_grad():
        model(input_ids=whole)
    after, apart = model.state_dict(), 0.0
    assert after.keys() == reference.state_dict().keys()
    for key, p in reference.named_parameters():
        apart = max(
            apart, ((after[key].full_tensor() - p).abs().max() / p.abs().max().clamp(min=1e-3)).item()
        )
    return worst, apart


def train_all(names: list[str]) -> dict[tuple[str, str], tuple[float, float]]:
    """Every model under both implementations, in one launch: importing transformers takes longest."""
    return {(name, system): train(system, name) for name in names for system in SYSTEMS}
