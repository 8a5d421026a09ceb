"""Checkpoints that transformers writes, into its models with stacked experts, sharded and on meta."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import tokens

from fsdp_runtime import MIXTRAL_EXPERTS, STACKED_EXPERTS, fully_shard, load_safetensors
from ragged_shard.testing import run_ranks

pytest.importorskip("transformers", reason="transformers is not installed (the extra `hf`)")
SIZES: dict[str, Any] = {
    "vocab_size": 12, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip


def make(kind):
    import transformers

    torch.manual_seed(0)
    if kind == "mixtral":
        config = transformers.MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2)
        return transformers.MixtralForCausalLM(config)
    more: dict[str, Any] = {
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "head_dim": 4,
    }
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **more))


def load(folder, kind, rules):
    wanted = make(kind).eval()
    if dist.get_rank() == 0:
        wanted.save_pretrained(folder, max_shard_size="20KB")
    dist.barrier()
    with torch.device("meta"):
        model = make(kind).eval()
    assert any("experts.gate_up_proj" in name for name, _ in model.named_parameters())
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    read = load_safetensors(model, folder, rules=rules).bytes_read
    model.model.rotary_emb = wanted.model.rotary_emb  # not in any file
    with torch.no_grad():
        assert model(input_ids=tokens()).logits.equal(wanted(input_ids=tokens()).logits)
    return read, sum(param.nbytes for param in wanted.parameters())


@pytest.mark.parametrize(("kind", "rules"), [("mixtral", MIXTRAL_EXPERTS), ("qwen3_moe", STACKED_EXPERTS)])
def test_experts_of_files_are_stacked_as_transformers_stacks_them(kind, rules, tmp_path):
    found = run_ranks(2, load, tmp_path, kind, rules)
    assert sum(read for read, _ in found) == found[0][1]
