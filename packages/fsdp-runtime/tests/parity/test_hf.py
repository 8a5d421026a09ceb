"""Models of transformers, as they are."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel.harness import Outcome, rows_of, train

import fsdp_runtime
from ragged_shard.testing import rank_mesh, run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra `hf`)")

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


def build(name: str) -> torch.nn.Module:
    """The model of a config, eager attention."""
    config = getattr(transformers, name)(**SMALL, **CONFIGS[name], attn_implementation="eager")
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def wrap(fsdp: Any, model: Any) -> None:
    for part in (*model.model.layers, model):
        fsdp.fully_shard(part, mesh=rank_mesh())


def batch(step: int) -> torch.Tensor:
    return torch.randint(61, (12, 10), generator=torch.Generator().manual_seed(step))


def loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def train_all() -> dict[str, Outcome]:
    """Every model in one launch: importing transformers takes longest."""
    share = rows_of(dist.get_rank(), dist.get_world_size())
    return {
        name: train(fsdp_runtime, partial(build, name), wrap, loss, batches=batch, share=share)
        for name in CONFIGS
    }


@pytest.mark.parametrize("ranks", [2, 3])
def test_transformers_models_train_as_in_one_process(ranks: int) -> None:
    for found in run_ranks(ranks, train_all, timeout=240):
        for name, apart in found.items():
            assert apart.loss < 1e-6, (name, apart)
            assert max(apart.gradients, apart.norm) < 1e-5, (name, apart)
