"""Where `mixed_optimizer_for` sends the parameters of twelve architectures of transformers: configs only, on meta.

`pytest -s` on this file prints the table.
"""

import re
from typing import Any

import pytest
import torch

from block_optim.routing.routes import routes_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

# Class of the model, its config's class and options, heads, embeddings, other matrices that are not Muon's, and the
# number of tensors that are.
LM, LAYERS = "AutoModelForCausalLM", {"num_hidden_layers": 2}
EXPERTS = {**LAYERS, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4}
ARCHITECTURES: dict[str, tuple[Any, ...]] = {
    "gpt2-medium": (LM, "GPT2", {"n_embd": 1024, "n_layer": 2, "n_head": 16}, [], ["wte", "wpe"], [], 8),
    "gpt-neo-1.3B": (LM, "GPTNeo", {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}, [],
                     ["wte", "wpe"], [], 12),
    "llama": (LM, "Llama", LAYERS, ["lm_head"], ["embed_tokens"], [], 14),
    "qwen3-moe": (LM, "Qwen3Moe", EXPERTS, ["lm_head"], ["embed_tokens"], [], 14),
    "deepseek-v3": (LM, "DeepseekV3", {**EXPERTS, "first_k_dense_replace": 1}, ["lm_head"], ["embed_tokens"], [], 19),
    "gpt-oss": (LM, "GptOss", EXPERTS, ["lm_head"], ["embed_tokens"],
                ["experts.down_proj_bias", "experts.gate_up_proj_bias"], 14),
    "gemma3": (LM, "Gemma3Text", LAYERS, [], ["embed_tokens"], [], 14),
    "mamba": (LM, "Mamba", LAYERS, [], ["embeddings"], ["mixer.A_log", "mixer.conv1d"], 8),
    "t5": ("AutoModelForSeq2SeqLM", "T5", {"num_layers": 2}, [], ["relative_attention_bias", "shared"], [], 32),
    "bert": ("AutoModelForMaskedLM", "Bert", LAYERS, [],
             ["position_embeddings", "token_type_embeddings", "word_embeddings"], [], 13),
    "vit": ("AutoModelForImageClassification", "ViT", LAYERS, ["classifier"],
            ["patch_embeddings.projection", "position_embeddings"], ["cls_token"], 12),
    "whisper": ("AutoModelForSpeechSeq2Seq", "Whisper", {"encoder_layers": 1, "decoder_layers": 1}, [],
                ["embed_positions", "embed_tokens"], [], 18),
}  # fmt: skip


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_only_embeddings_heads_and_stacked_vectors_of_an_architecture_are_not_muons(architecture):
    loader, config, options, heads, embeddings, others, matrices = ARCHITECTURES[architecture]
    with torch.device("meta"):
        settings = getattr(transformers, f"{config}Config")(**options)
        model = getattr(transformers, loader).from_config(settings)
    routes = routes_of(model, others="adamw", overrides={})

    def names(reasons):
        chosen = [
            r.names[0].removesuffix(".weight") for r in routes if r.reason in reasons and len(r.shape) > 1
        ]
        return {re.sub(r".*\.\d+\.|^(model|transformer|backbone|vit|bert)\.", "", name) for name in chosen}

    def covers(chosen, expected):
        return len(chosen) == len(expected) and all(any(c.endswith(e) for c in chosen) for e in expected)

    muon = [r for r in routes if r.algorithm == "muon"]
    share = sum(map(_numel, muon)) / sum(map(_numel, routes))
    table = [sorted(names({reason})) for reason in ("head", "embedding")]
    rest = sorted(names({"vector", "depthwise"}))
    print(
        f"\n| {architecture} | {len(muon)} ({share:.0%}) |",
        *(f"{', '.join(x) or '-'} |" for x in [*table, rest]),
    )
    assert covers(names({"head"}), heads)
    assert covers(names({"embedding"}), embeddings)
    assert covers(names({"vector", "depthwise"}), others)
    assert len(muon) == matrices


def _numel(route):
    return torch.Size(route.shape).numel()
