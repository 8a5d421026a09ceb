"""Checkpoints that transformers writes, into its models with stacked experts, sharded and on meta."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import assert_same_values, tokens
from vllm_contract import interface

from fsdp_runtime import fully_shard, get_full_state_dict, load_safetensors, save_safetensors
from fsdp_runtime.checkpoint import Rule
from fsdp_runtime.integrations.vllm import weight_source
from ragged_shard.testing import run_ranks

pytest.importorskip("transformers", reason="transformers is not installed (the extra `hf`)")
SIZES: dict[str, Any] = {
    "vocab_size": 12, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip


MOE, EACH = "{layer}.block_sparse_moe", "{layer}.mlp.experts.{index}"
EXPERTS = {
    "mixtral": [
        Rule(
            "{layer}.mlp.experts.gate_up_proj",
            (MOE + ".experts.{index}.w1.weight", MOE + ".experts.{index}.w3.weight"),
        ),
        Rule("{layer}.mlp.experts.down_proj", (MOE + ".experts.{index}.w2.weight",)),
        Rule("{layer}.mlp.{rest}", MOE + ".{rest}"),
    ],
    "qwen3_moe": [
        Rule("{layer}.mlp.experts.gate_up_proj", (EACH + ".gate_proj.weight", EACH + ".up_proj.weight")),
        Rule("{layer}.mlp.experts.down_proj", (EACH + ".down_proj.weight",)),
    ],
}


def make(kind):
    import transformers

    torch.manual_seed(0)
    if kind == "vit":
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 8}
        config = transformers.ViTConfig(hidden_size=16, patch_size=4, num_labels=3, **sizes)
        return transformers.ViTForImageClassification(config)
    if kind == "nomic_bert":
        return transformers.NomicBertModel(transformers.NomicBertConfig(**SIZES))
    if kind == "mixtral":
        config = transformers.MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2)
        return transformers.MixtralForCausalLM(config)
    more: Any = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 4}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **more))


def on_meta(kind, wanted):
    """The model without memory, but with the tables that are in no file."""
    with torch.device("meta"):
        model: Any = make(kind).eval()
    for name, module in model.named_modules():
        for key in module._non_persistent_buffers_set:
            module._buffers[key] = wanted.get_submodule(name)._buffers[key]
    return model


def round_trip(folder, kind):
    from safetensors.torch import load_file

    wanted = make(kind).eval()
    if dist.get_rank() == 0:
        wanted.save_pretrained(folder / "theirs", max_shard_size="20KB")
    dist.barrier()
    model = on_meta(kind, wanted)
    for child in next(one for one in model.modules() if isinstance(one, torch.nn.ModuleList)):
        fully_shard(child)
    fully_shard(model)
    report = load_safetensors(model, folder / "theirs")
    assert (report.missing, report.unexpected) == ((), ())
    full = get_full_state_dict(model)
    assert_same_values(full, wanted.state_dict())
    save_safetensors(model, folder / "ours", max_file_bytes=20_000)
    theirs, ours = (
        {
            name: tensor
            for file in (folder / of).glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        for of in ("theirs", "ours")
    )
    assert_same_values(ours, theirs)
    if kind in EXPERTS:
        model = fully_shard(on_meta(kind, wanted))
        assert any("experts.gate_up_proj" in name for name, _ in model.named_parameters())
        read = torch.tensor(load_safetensors(model, folder / "theirs", rules=EXPERTS[kind]).bytes_read)
        dist.all_reduce(read)
        assert read == sum(param.nbytes for param in wanted.parameters())
        with torch.no_grad():
            assert model(input_ids=tokens()).logits.equal(wanted(input_ids=tokens()).logits)
    with interface():
        source = weight_source(model, bucket_bytes=5000)
    passed = {name: tensor.clone() for name, tensor in source.iter_full()}
    assert list(passed) == [meta.name for meta in source.metadata]
    assert_same_values(passed, theirs)
    with pytest.raises(
        NotImplementedError, match=r"save_pretrained: this rank holds shards; .*save_safetensors"
    ):
        model.save_pretrained(folder / "alone")
    model.save_pretrained(folder / "full", state_dict=full, is_main_process=dist.get_rank() == 0)
    return len(set(theirs) - set(wanted.state_dict()))


@pytest.mark.parametrize("kind", ["vit", "mixtral", "qwen3_moe", "nomic_bert"])
def test_files_have_the_names_and_forms_that_transformers_gives_them(kind, tmp_path):
    renamed = run_ranks(2, round_trip, tmp_path, kind)
    assert renamed[0] == renamed[1] > 0
