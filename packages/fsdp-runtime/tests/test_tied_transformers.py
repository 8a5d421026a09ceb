"""Models of transformers whose weights are tied, wrapped as users do, next to one process. Built from configs alone."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from fsdp_runtime import fully_shard, get_full_state_dict
from ragged_shard.testing import on_ranks, record_collectives, run_ranks

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


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", MODELS)
@on_ranks("ranks")
def test_it_trains_as_in_one_process_in_any_order_of_wrapping(kind, ranks):
    for order in MODELS[kind][1]:
        check(kind, order)


@on_ranks(2)
def test_units_of_embedding_and_head_send_nothing_in_addition():
    found = []
    for order in (("*", ""), ("transformer.wte", "*", "lm_head", "")):
        model = wrapped("gpt2", order)
        batch = torch.zeros(2, 5, dtype=torch.int64)
        loss_of(model, batch).backward()
        with record_collectives() as record:
            loss_of(model, batch).backward()
        found.append((sorted(record.kinds), record.bytes_sent))
    assert found[0] == found[1]


@on_ranks(2)
def test_tying_models_after_sharding_raises_on_every_rank():
    model: Any = make("gpt2")
    model.lm_head.weight = nn.Parameter(model.transformer.wte.weight.detach().clone())
    fully_shard(model)
    model.tie_weights()
    with pytest.raises((RuntimeError, ValueError), match="Tie parameters before fully_shard"):
        loss_of(model, torch.zeros(2, 5, dtype=torch.int64))


def ends(kind):
    """An order of wrapping in which embedding and head are units of their own."""
    return next(order for order in MODELS[kind][1] if len(order) > 3)


def save(folder, kind):
    model = wrapped(kind, ("*", ""))
    step_of(model, BATCH, torch.optim.SGD(model.parameters(), lr=0.05))
    dcp.save(model.state_dict(), checkpoint_id=folder)


def load(folder, kind):
    plain = make(kind)
    step_of(plain, BATCH, torch.optim.SGD(plain.parameters(), lr=0.05))
    for order in (ends(kind), ("",)):
        model: Any = wrapped(kind, order)
        state = model.state_dict()
        assert list(state) == list(plain.state_dict())
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state)
        for name, value in get_full_state_dict(model).items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", MODELS)
def test_a_checkpoint_has_all_names_and_loads_where_units_and_world_size_are_others(kind, tmp_path):
    run_ranks(2, save, str(tmp_path), kind)
    run_ranks(3, load, str(tmp_path), kind)


@on_ranks(3)
def test_a_checkpoint_of_an_untied_model_raises_on_every_rank_where_it_is_tied(tmp_path):
    untied: Any = make("t5")
    untied.lm_head.weight = nn.Parameter(untied.shared.weight.detach() + 1)
    dcp.save(fully_shard(untied).state_dict(), checkpoint_id=tmp_path)
    model = wrapped("t5", ends("t5"))
    state = model.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match=r"weight is one parameter in 4 modules, and was given different"):
        model.load_state_dict(state)
