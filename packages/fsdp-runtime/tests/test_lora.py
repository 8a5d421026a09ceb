"""peft's LoRA as it is, on models of transformers: a base in four bits, and in bf16."""

import time

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import BF16, llama, tokens
from test_weights_at_rest import NF4, whole
from vllm_contract import interface

from fsdp_runtime import (
    QuantizationPolicy,
    full_params,
    fully_shard,
    iter_full_params,
    merged_params,
    save_safetensors,
)
from fsdp_runtime.checkpoint import read_safetensors
from fsdp_runtime.integrations.vllm import weight_source
from fsdp_runtime.train.plan import LiveBytes
from ragged_shard.testing import on_ranks

pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("transformers", reason="transformers is not installed (the extra `hf`)")


def adapted(hidden_size=64, intermediate_size=128):
    """A tiny Llama with LoRA on its projections, every adapter different from zero."""
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)
    model = peft.get_peft_model(llama(hidden_size=hidden_size, intermediate_size=intermediate_size), config)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.1)
    return model


def sharded(model):
    for layer in model.model.model.layers:
        fully_shard(layer, quantization_policy=QuantizationPolicy(at_rest=NF4))
    return fully_shard(model)


def loss_of(model, batch):
    return model(input_ids=batch, labels=batch).loss


def mixed():
    """A Llama in bf16 with adapters in fp32, as peft makes them."""
    model = adapted()
    for name, param in model.named_parameters():
        if "lora_" not in name:
            param.data = param.data.bfloat16()
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16, torch.float32}
    return model


def sharded_mixed(model):
    for layer in model.model.model.layers:
        fully_shard(layer, mp_policy=BF16)
    fully_shard(model.get_base_model(), mp_policy=BF16)  # what `merge_and_unload` returns
    return model


@on_ranks(3)
def test_adapters_train_are_saved_and_merged_on_a_frozen_bf16_base(tmp_path):
    import peft
    from peft.utils import get_peft_model_state_dict

    model = sharded_mixed(mixed())
    base = {name: p.full_tensor().detach() for name, p in model.named_parameters() if "lora_" not in name}
    start = {name: p.full_tensor().detach() for name, p in model.named_parameters() if "lora_" in name}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(3):
        loss_of(model, tokens(step)).backward()
        for name, param in model.named_parameters():
            assert (param.grad is None) == ("lora_" not in name), name
        optimizer.step()
        optimizer.zero_grad()
    assert all("lora_" in name for name, p in model.named_parameters() if p in optimizer.state)
    adapters = {name: p.full_tensor().detach() for name, p in model.state_dict().items() if "lora_" in name}
    assert all(p.dtype == torch.float32 for p in adapters.values())
    assert all(not adapters[name].equal(start[name]) for name in start)
    assert all(p.full_tensor().equal(base[n]) for n, p in model.named_parameters() if "lora_" not in n)

    if dist.get_rank() == 0:
        model.save_pretrained(tmp_path, state_dict=adapters)
    dist.barrier()
    plain = mixed()
    peft.set_peft_model_state_dict(plain, peft.load_peft_weights(tmp_path))
    for name, value in get_peft_model_state_dict(plain).items():
        assert value.equal(get_peft_model_state_dict(model)[name].full_tensor())
    logits = model(input_ids=tokens(5)).logits

    with full_params(model):
        model.merge_adapter()
    merged_logits = model(input_ids=tokens(5)).logits
    torch.testing.assert_close(merged_logits.float(), logits.float(), atol=0.05, rtol=0.05)
    with full_params(model):
        model.unmerge_adapter()
        for name, param in model.named_parameters():  # unmerging rounds
            if "lora_" not in name:
                param.copy_(base[name])
        merged = model.merge_and_unload()
    wanted = plain.merge_and_unload().state_dict()
    found = merged.state_dict()
    assert found.keys() == wanted.keys()
    assert not any("lora_" in name for name in found)
    for name, value in found.items():
        assert value.full_tensor().equal(wanted[name]), name
    after = merged(input_ids=tokens(5)).logits
    torch.testing.assert_close(after.float(), logits.float(), atol=0.05, rtol=0.05)


@on_ranks(2)
def test_a_base_of_codes_is_merged_layer_by_layer_and_the_rest_keeps_its_codes():
    from peft.tuners.lora import LoraLayer

    model, plain = sharded(adapted()), adapted()
    with pytest.raises(NotImplementedError, match=r"aten\.mm.*full_params"):
        model.merge_and_unload()
    for layer, same in zip(model.model.model.layers, plain.model.model.layers, strict=True):
        before = {n: p.local.codes.clone() for n, p in layer.named_parameters() if hasattr(p.local, "codes")}
        for param in same.parameters():
            if not param.requires_grad and param.ndim == 2:
                param.data = whole(NF4, param)[2]
        with full_params(layer):
            for module, other in zip(layer.modules(), same.modules(), strict=True):
                if isinstance(module, LoraLayer):
                    module.merge()
                    other.merge()
        for name, param in layer.named_parameters():
            if name in before:
                assert param.local.codes.equal(before[name]) == (
                    "base_layer" not in name or not param.local.numel()
                )


def in_many_ways():
    """LoRA on a linear layer, DoRA on another, on an embedding, on a parameter, and a module that is trained whole."""
    import peft

    model = llama(hidden_size=64, intermediate_size=128)
    model.model.experts = torch.nn.Module()
    model.model.experts.register_parameter("stack", torch.nn.Parameter(torch.randn(3, 6, 5)))
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "embed_tokens"],
        target_parameters=["experts.stack"],
        modules_to_save=["lm_head"],
    )
    model = peft.get_peft_model(model, config)
    for name, param in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(param, std=0.1)
    return model


def dora():
    import peft

    model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["v_proj"], use_dora=True))
    for name, param in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.uniform_(param)
    return model


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_merged_params_are_those_that_peft_merges_in_one_process(ranks, tmp_path):
    for make in (in_many_ways, dora):
        model = make()
        for layer in model.get_base_model().model.layers:
            fully_shard(layer)
        fully_shard(model)
        before = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
        wanted = make().merge_and_unload().state_dict()
        for bucket in (1, 1 << 30):
            found = dict(iter_full_params(merged_params(model), bucket_bytes=bucket))
            assert found.keys() == wanted.keys()
            assert all(found[name].equal(value) for name, value in wanted.items())
        halves = dict(iter_full_params(merged_params(model), dtype=torch.bfloat16, ranks=[1]))
        assert bool(halves) == (dist.get_rank() == 1)
        assert all(value.equal(wanted[name].bfloat16()) for name, value in halves.items())
        save_safetensors(merged_params(model), tmp_path)
        files = read_safetensors(tmp_path)
        assert files.keys() == wanted.keys()
        assert all(value.equal(wanted[name]) for name, value in files.items())
        assert all(p.full_tensor().equal(before[name]) for name, p in model.named_parameters())


@on_ranks(2)
def test_merged_params_of_a_base_of_codes_are_merged_values():
    model, plain = sharded(adapted()), adapted()
    for name, param in plain.named_parameters():
        if not param.requires_grad and "layers" in name and param.ndim == 2:
            param.data = whole(NF4, param)[2]
    wanted = plain.merge_and_unload().state_dict()
    with interface():
        source = weight_source(merged_params(model), dtype=torch.bfloat16)
    assert {meta.name: meta.shape for meta in source.metadata} == {
        n: tuple(v.shape) for n, v in wanted.items()
    }
    for _ in range(2):
        found = dict(source.iter_full())
        assert found.keys() == wanted.keys()
        assert all(found[name].equal(value.bfloat16()) for name, value in wanted.items())
    late = source.iter_full()
    with torch.no_grad():
        model.model.model.layers[1].mlp.down_proj.lora_B["default"].weight.mul_(2)
    with pytest.raises(RuntimeError, match="was written to since iter_full"):
        list(late)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("IA3Config", {"feedforward_modules": []}, r"IA3Model.*full_params"),
        (
            "LoraConfig",
            {"alora_invocation_tokens": [1], "task_type": "CAUSAL_LM"},
            r"layers\.0\.self_attn\.v_proj: ",
        ),
    ],
)
def test_adapters_that_merged_params_cannot_merge_are_refused_by_name(kind, options, words):
    import peft

    model = peft.get_peft_model(llama(), getattr(peft, kind)(target_modules=["v_proj"], **options))
    with pytest.raises(NotImplementedError, match=words):
        merged_params(model)


@on_ranks(2)
def test_an_export_with_adapters_takes_little_more_than_the_largest_tensor():
    model = adapted(hidden_size=256, intermediate_size=1024)
    for layer in model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    peaks = []
    for pause in (0.05, 0.3):  # gloo's thread lets go of a tensor a moment after it was sent
        largest, live = 0, LiveBytes()
        with live:
            for _, tensor in iter_full_params(merged_params(model), bucket_bytes=1):
                largest = max(largest, tensor.nbytes)
                del tensor
                time.sleep(pause)
        peaks.append(live.peak)
    assert largest < min(peaks) < largest * 1.5, (peaks, largest)
