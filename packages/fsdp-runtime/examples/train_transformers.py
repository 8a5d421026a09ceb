"""A small Llama, trained by transformers' Trainer on every GPU of this machine and sharded by fsdp_runtime.

    torchrun --nproc-per-node=gpu train_transformers.py

Next to a script for the Trainer with FSDP2 one class differs, and what it may be told of blocks.
"""

import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fsdp_runtime import block_policies
from fsdp_runtime.integrations.transformers import RaggedTrainer

CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)


class FSDPTrainer(RaggedTrainer, Trainer):
    """transformers' Trainer, whose `fsdp=True` means fsdp_runtime."""


def arguments(folder: str, **options: Any) -> TrainingArguments:
    """As for FSDP2."""
    return TrainingArguments(
        output_dir=folder,
        fsdp=True,  # type: ignore[arg-type]
        fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": "SHARDED_STATE_DICT"},
        max_steps=8,
        save_steps=4,
        logging_steps=1,
        learning_rate=3e-3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        report_to=[],
        **options,
    )  # fmt: skip


def train(kind: Any, args: TrainingArguments, **options: Any) -> list[float]:
    """Train with a trainer of this class, then again from half-way. Returns the losses after it."""
    text = [{"input_ids": row, "labels": row} for row in torch.arange(32).repeat(64, 1)]
    for checkpoint in (None, f"{args.output_dir}/checkpoint-4"):
        torch.manual_seed(0)
        trainer = kind(LlamaForCausalLM(CONFIG), args, train_dataset=text, eval_dataset=text[:8], **options)
        trainer.train(resume_from_checkpoint=checkpoint)
    trainer.evaluate()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        print(train(FSDPTrainer, arguments(made), shard_options={"block_policy": block_policies.rows(8)}))
