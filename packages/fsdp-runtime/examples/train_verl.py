"""A language model on disk, trained by verl's FSDP engine on every GPU of this machine and sharded by fsdp_runtime.

    torchrun --nproc_per_node gpu train_verl.py MODEL FOLDER

In verl's own jobs the call of `register` is all: it goes into a module that VERL_USE_EXTERNAL_MODULES names.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.base import EngineRegistry

from fsdp_runtime import block_policies
from fsdp_runtime.integrations.verl import register


def counting(step: int, rows: int = 4, vocabulary: int = 32) -> TensorDict:
    """This rank's rows, texts that count from some number on: nested tensors of several lengths."""
    first = 4 * (step * dist.get_world_size() + dist.get_rank())
    ids = [(torch.arange(6 + row % 3) + first + row) % vocabulary for row in range(rows)]
    positions = [torch.arange(len(row)) for row in ids]
    columns = {"input_ids": ids, "position_ids": positions, "loss_mask": [p >= 0 for p in positions]}
    nested = {name: torch.nested.as_nested_tensor(v, layout=torch.jagged) for name, v in columns.items()}
    data = TensorDict(nested, batch_size=[rows])
    settings = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "use_remove_padding": False}
    tensordict_utils.assign_non_tensor(data, temperature=1.0, **settings)
    return data


def loss_of(model_output: Any, data: TensorDict, dp_group: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """The mean over the rank's tokens, of which there are as many on every rank."""
    return -model_output["log_probs"].values().sum() / data["input_ids"].values().numel(), {}


def train(path: str, folder: str, steps: int = 20) -> list[float]:
    """Losses of this rank; the last checkpoint is in the folder."""
    options = {"use_remove_padding": False, "override_config": {"attn_implementation": "sdpa"}}
    model = HFModelConfig(path=path, load_tokenizer=False, **options)
    config = FSDPEngineConfig(strategy="fsdp2", use_dynamic_bsz=False, micro_batch_size_per_gpu=2)
    kind = EngineRegistry.get_engine_cls("language_model", "fsdp2")
    engine = kind(model, config, FSDPOptimizerConfig(lr=1e-2), CheckpointConfig())
    engine.initialize()
    with engine.train_mode():
        losses = [sum(engine.train_batch(counting(step), loss_of)["loss"]) for step in range(steps)]
    engine.save_checkpoint(folder)
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    register(block_policy=block_policies.rows(8))
    print(train(sys.argv[1], sys.argv[2])[-1])
