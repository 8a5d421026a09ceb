"""T5, whose embedding is tied in four modules of two stacks, wrapped as users do, next to one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_runtime import fully_shard, get_full_state_dict
from ragged_shard.testing import on_ranks

pytest.importorskip("transformers", reason="transformers is not installed (the extra `hf`)")

# Orders in which units are made; "*" stands for the blocks.
ORDERS = (
    ("*", ""), ("shared", "*", "encoder", "decoder", "lm_head", ""), ("", "decoder", "encoder", "*"),
    ("*", "encoder", "decoder", "lm_head", "shared", ""),
)  # fmt: skip


def make():
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 21,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 2,
    }
    config = transformers.T5Config(
        **sizes, tie_word_embeddings=True, dropout_rate=0.0, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def wrapped(order):
    model = make()
    for name in order:
        blocks = [*model.encoder.block, *model.decoder.block]
        for module in blocks if name == "*" else [model.get_submodule(name)]:
            fully_shard(module)
    return model


def step_of(model, batch, optimizer):
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@on_ranks(3)
def test_a_tied_model_trains_as_in_one_process_in_any_order_of_wrapping():
    for order in ORDERS:
        model, plain = wrapped(order), make()
        head: Any = model.get_output_embeddings()
        model.tie_weights()  # they are, so that nothing changes
        assert head.weight is model.get_input_embeddings().weight
        assert list(model.state_dict()) == list(plain.state_dict())
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
        ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, plain))
        for step in range(2):
            whole = torch.randint(21, (6, 7), generator=torch.Generator().manual_seed(step))
            loss = step_of(model, whole.chunk(3)[dist.get_rank()], ours)
            dist.all_reduce(loss)
            torch.testing.assert_close(loss / 3, step_of(plain, whole, theirs))
        torch.testing.assert_close(get_full_state_dict(model), dict(plain.state_dict()), rtol=1e-4, atol=1e-6)
        assert head.weight is model.get_input_embeddings().weight
