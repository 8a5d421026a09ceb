"""A small Llama of transformers, trained by Accelerate on every GPU of this machine and sharded by fsdp_runtime.

    accelerate launch --use_fsdp --fsdp_version 2 train_accelerate.py

Next to a script for Accelerate with FSDP2 three lines differ: `shard`, `prepare` and `load_state` come from here.
"""

import tempfile

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_runtime import block_policies
from fsdp_runtime.integrations.accelerate import load_state, prepare, shard

CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)


def plugin() -> FullyShardedDataParallelPlugin:
    """What Accelerate is told for FSDP2; `shard` reads the same."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )


def train(accelerator: Accelerator, folder: str, steps: int = 8) -> list[float]:
    """Train, with a checkpoint half-way that training goes on from. Returns the losses."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    shard(model, accelerator.state.fsdp_plugin, block_policy=block_policies.rows(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.arange(32).repeat(2 * steps * accelerator.num_processes, 1)
    loader = DataLoader(list(text), batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)
    losses = []
    for step, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        if step == steps // 2:
            accelerator.save_state(folder)
            load_state(accelerator, folder)
    return losses


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        print(train(Accelerator(fsdp_plugin=plugin(), gradient_accumulation_steps=2), made))
