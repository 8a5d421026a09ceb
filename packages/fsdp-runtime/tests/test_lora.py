"""peft's LoRA as it is, on a model of transformers whose base is kept in four bits."""

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import tokens
from test_weights_at_rest import NF4, whole

from dbuffer import BlockQuantizedTensor
from fsdp_runtime import QuantizationPolicy, fully_shard
from ragged_shard.testing import run_ranks

pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("transformers", reason="transformers is not installed (the extra `hf`)")


def llama():
    """A tiny Llama with LoRA on its projections, every adapter different from zero."""
    import peft
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=12, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    targets = ["q_proj", "v_proj", "down_proj"]
    model = peft.get_peft_model(
        transformers.LlamaForCausalLM(config), peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.0)
    )
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.1)
    return model


def sharded(model):
    for layer in model.model.model.layers:
        fully_shard(layer, quantize=QuantizationPolicy(at_rest=NF4))
    return fully_shard(model)


def loss_of(model, batch):
    return model(input_ids=batch, labels=batch).loss


def train():
    import peft

    reference, model, ranks = llama(), sharded(llama()), dist.get_world_size()
    coded = {
        name for name, param in model.named_parameters() if isinstance(param.local, BlockQuantizedTensor)
    }
    assert coded == {
        n for n, p in reference.named_parameters() if "layers" in n and not p.requires_grad and p.ndim == 2
    }
    for name, param in reference.named_parameters():
        if name in coded:
            param.data = whole(NF4, param)[2]
    both = (reference, model)
    optimizers = [
        torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=1e-2) for one in both
    ]
    for step in range(3):
        losses = [loss_of(reference, tokens(step, rank=rank)) for rank in range(ranks)]
        (sum(losses) / ranks).backward()
        loss = loss_of(model, tokens(step))
        loss.backward()
        torch.testing.assert_close(loss, losses[dist.get_rank()])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    adapters = peft.get_peft_model_state_dict(model)
    expected = peft.get_peft_model_state_dict(reference)
    assert adapters.keys() == expected.keys()
    for name, value in adapters.items():
        torch.testing.assert_close(value.full_tensor(), expected[name], rtol=1e-4, atol=1e-5)
    again = sharded(llama())
    peft.set_peft_model_state_dict(again, adapters)
    assert loss_of(again, tokens()).equal(loss_of(model, tokens()))


@pytest.mark.parametrize("ranks", [2, 3])
def test_adapters_of_peft_train_on_a_base_of_four_bits(ranks):
    run_ranks(ranks, train)
