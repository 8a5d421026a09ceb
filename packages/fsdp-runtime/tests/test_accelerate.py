"""Accelerate's own functions on models that we have sharded, compared with FSDP2 in the same trainer.

Accelerate takes DistributedDataParallel on CPU. The tests tell its state that the ranks are FSDP's, as on GPUs.
"""

import os

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import assert_same_values, example_script, llama, tokens, with_examples
from torch import nn

from fsdp_runtime.integrations import accelerate as ours
from ragged_shard.state_dict import full_state_dict
from ragged_shard.testing import on_ranks, record_collectives

pytest.importorskip("accelerate", reason="accelerate is not installed (the extra `accelerate`)")
pytest.importorskip("transformers", reason="transformers is not installed (the extra `hf`)")


def fresh_state():
    """Clear Accelerate's state, and set what torchrun sets in the environment."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    size, rank = str(dist.get_world_size()), str(dist.get_rank())
    os.environ.update(WORLD_SIZE=size, RANK=rank, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")


def accelerator_for(accumulate=1, **options):
    """An accelerator whose ranks are FSDP2's, on CPU."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    fresh_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # a trainer's job on this rank may have left it
    options = {"cpu_ram_efficient_loading": False, "reshard_after_forward": True, **options}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        **options,
    )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    for state in (AcceleratorState, PartialState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    assert accelerator.is_fsdp2
    return accelerator, plugin


def prepared(system, model=None, **options):
    """The accelerator, the model and its optimizer."""
    accelerator, plugin = accelerator_for(**options)
    model = model or llama()
    if system == "ours":
        ours.shard(model, plugin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepare = (
        accelerator.prepare if system == "fsdp2" else lambda *objects: ours.prepare(accelerator, *objects)
    )
    return (accelerator, *prepare(model, optimizer))


def train(accelerator, model, optimizer, steps=range(4)):
    """Losses and norms, and how many reduce-scatters each microbatch took."""
    found, reductions = [], []
    for step in steps:
        batch = tokens(step)
        with record_collectives() as record, accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            norm = 0.0
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        found += [float(loss.detach()), float(norm)]
        reductions.append(sum("reduce_scatter" in kind for kind in record.kinds))
    return found, reductions


@on_ranks(3)
def test_cpu_ram_efficient_loading_takes_rank_0s_values_and_keeps_ties_and_buffers():
    for tied in (False, True):
        expected = llama(tie_word_embeddings=tied)
        mine = llama(seed=dist.get_rank(), tie_word_embeddings=tied)  # only rank 0 has the values
        _, plugin = accelerator_for(cpu_ram_efficient_loading=True)
        ours.shard(mine, plugin)
        assert_same_values(full_state_dict(mine), expected.state_dict())
        assert (mine.lm_head.weight is mine.model.embed_tokens.weight) == tied
        for name, buffer in expected.named_buffers():
            assert mine.get_buffer(name).equal(buffer), name
        mine = llama(seed=dist.get_rank(), tie_word_embeddings=tied)
        losses, _ = train(*prepared("ours", model=mine, cpu_ram_efficient_loading=True))
        theirs, _ = train(*prepared("fsdp2", model=llama(tie_word_embeddings=tied)))
        assert losses == pytest.approx(theirs, rel=1e-5)


@on_ranks(2)
def test_options_of_the_plugin_are_kept_and_others_are_refused():
    options = {"mixed_precision_policy": "bf16", "ignored_modules": "model.norm"}
    _, plugin = accelerator_for(reshard_after_forward=False, **options)
    model = llama().bfloat16()
    ours.shard(model, plugin)
    assert model.lm_head.weight.dtype == torch.float32
    weights = [model.model.norm.weight, model.model.layers[0].mlp.up_proj.weight]
    assert [type(weight.data) is torch.Tensor for weight in weights] == [True, False]
    loss = model(input_ids=tokens(), labels=tokens()).loss
    assert type(model.model.layers[0].mlp.up_proj.weight.data) is torch.Tensor  # still gathered
    loss.backward()
    assert model.lm_head.weight.grad.dtype == torch.float32
    with pytest.raises(ValueError, match="is sharded already"):
        ours.shard(model, plugin)
    plugin.activation_checkpointing = True
    with pytest.raises(ValueError, match="activation_checkpointing=True"):
        ours.shard(llama(), plugin)
    plugin.fsdp_version = 1
    with pytest.raises(ValueError, match="fsdp_version=1; expected 2"):
        ours.shard(nn.Linear(2, 2), plugin)


@with_examples
@on_ranks(2)
def test_the_example_trains(tmp_path):
    script = example_script("train_accelerate")
    accelerator, _ = accelerator_for(accumulate=2)
    losses = script.train(accelerator, str(tmp_path))
    assert len(losses) == 8
    assert losses[-1] < losses[0]
