"""Models of transformers whose weights are tied, wrapped as users do, next to one process. Built from configs alone."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_runtime import fully_shard, get_full_state_dict
from ragged_shard.testing import on_ranks

pytest.importorskip("transformers", reason="transformers is not installed (the extra `hf`)")

SIZES: dict[str, Any] = {"vocab_size": 21, "tie_word_embeddings": True}
BATCH = torch.arange(14).view(2, 7)
# Of each model: its blocks, and orders in which units are made of other modules; "*" stands for the blocks.
MODELS = {
    "gpt2": (
        ("transformer.h",),
        [("*", ""), ("transformer.wte", "*", "lm_head", ""), ("", "*"), ("*", "transformer", "lm_head", "")],
    ),
    "gemma": (
        ("model.layers",),
        [("*", ""), ("model.embed_tokens", "*", "lm_head", ""), ("", "lm_head", "*"), ("*", "model", "")],
    ),
    "t5": (
        ("encoder.block", "decoder.block"),
        [
            ("*", ""),
            ("shared", "*", "encoder", "decoder", "lm_head", ""),
            ("", "decoder", "encoder", "*"),
            ("*", "encoder", "decoder", "lm_head", "shared", ""),
        ],
    ),
}


def make(kind):
    import transformers

    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "n_inner": 24}
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **sizes, **off))
    if kind == "gemma":
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        more = {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 16}
        return transformers.GemmaForCausalLM(transformers.GemmaConfig(**SIZES, **sizes, **more))
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**SIZES, **sizes, dropout_rate=0.0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def wrapped(kind, order):
    model = make(kind)
    lists, _ = MODELS[kind]
    for name in order:
        blocks = [block for path in lists for block in model.get_submodule(path)]
        for module in blocks if name == "*" else [model.get_submodule(name)]:
            fully_shard(module)
    return model


def loss_of(model, batch):
    return model(input_ids=batch, labels=batch).loss


def step_of(model, batch, optimizer):
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def check(kind, order):
    model: Any = wrapped(kind, order)
    plain = make(kind)
    head = model.get_output_embeddings()
    model.tie_weights()  # they are, so that nothing changes
    assert head.weight is model.get_input_embeddings().weight
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, plain))
    for step in range(2):
        whole = torch.randint(
            21, (2 * dist.get_world_size(), 7), generator=torch.Generator().manual_seed(step)
        )
        loss = step_of(model, whole.chunk(dist.get_world_size())[dist.get_rank()], ours)
        dist.all_reduce(loss)
        torch.testing.assert_close(loss / dist.get_world_size(), step_of(plain, whole, theirs))
    full = get_full_state_dict(model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(full[name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert head.weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@on_ranks("ranks")
def test_it_trains_as_in_one_process_in_any_order_of_wrapping(kind, ranks):
    for order in MODELS[kind][1]:
        check(kind, order)
