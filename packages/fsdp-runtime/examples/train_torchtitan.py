"""The small Llama of torchtitan, trained by its Trainer on every GPU of this machine and sharded by fsdp_runtime.

    torchrun --nproc_per_node gpu train_torchtitan.py FOLDER

Next to a script for torchtitan with FSDP2 one line differs: `parallelize_fn`.
"""

import dataclasses
import sys
import tempfile
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config.configs import ParallelismConfig, TrainingConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from fsdp_runtime import block_policies
from fsdp_runtime.integrations.torchtitan import parallelize_fn


class Counting(ParallelAwareDataloader):
    """Texts that count: 0 1 2 3 ..., each from another number on."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """Of a class with arguments of its own, torchtitan wants this too."""

    def __init__(self, config: Config, dp_rank: int, dp_world_size: int, seq_len: int, **options: Any):
        at = torch.arange(seq_len)
        texts = [({"input": (at + n) % 64, "positions": at}, (at + n + 1) % 64) for n in range(6400)]
        rows = options["local_batch_size"]
        super().__init__(texts[dp_rank::dp_world_size], dp_rank, dp_world_size, batch_size=rows)


def trainer(spec: ModelSpec, folder: str, assets: str, steps: int, make: type[Trainer] = Trainer) -> Trainer:
    """One that saves every 4 steps, and starts from the last checkpoint in the folder."""
    spec.parallelize_fn = parallelize_fn(spec.parallelize_fn, block_policy=block_policies.rows(8))
    Tokenizer(WordLevel({str(number): number for number in range(64)})).save(f"{assets}/tokenizer.json")
    config = make.Config(
        model_spec=spec, hf_assets_path=assets, dump_folder=folder, dataloader=Counting.Config(),
        optimizer=default_adamw(lr=3e-3), lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(local_batch_size=2, seq_len=16, steps=steps, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"), loss=CrossEntropyLoss.Config(),
        checkpoint=CheckpointManager.Config(enable=True, interval=4, last_save_model_only=False),
    )  # fmt: skip
    return make(config)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as assets:
        trainer(model_registry("debugmodel"), sys.argv[1], assets, steps=100).train()
