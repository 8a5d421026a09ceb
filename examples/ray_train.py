"""Trains a sharded model under Ray Train, with checkpoints in Ray's storage, from which the next run continues.

python examples/ray_train.py --storage /shared/runs --workers 2 --steps 4
python examples/ray_train.py --storage /shared/runs --workers 2 --steps 8       continues at step 5
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed.checkpoint as dcp
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from block_optim import AdamW8bit
from fsdp_runtime import fully_shard


def train(config: dict[str, Any]) -> None:
    """One worker's loop; Ray has initialized torch.distributed."""
    torch.manual_seed(0)
    device = ray.train.torch.get_device()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4))).to(device)
    for block in model:
        fully_shard(block, block_policy=AdamW8bit.block_policy())
    fully_shard(model, block_policy=AdamW8bit.block_policy())
    optimizer = AdamW8bit(model.named_parameters(), lr=1e-2)

    first = 0
    if checkpoint := ray.train.get_checkpoint():  # its files come from all workers of the last run
        weights, states = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": states, "step": 0}
        with checkpoint.as_directory() as folder:
            dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        first = state["step"]

    for step in range(first + 1, config["steps"] + 1):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 256, generator=generator).to(device)
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with tempfile.TemporaryDirectory() as folder:
            weights, states = get_state_dict(model, optimizer)
            # Ray copies each worker's files into one folder of its storage; each worker writes its own shards.
            saved = {"model": weights, "optimizer": states, "step": step}
            dcp.save(saved, checkpoint_id=folder)
            metrics = {"step": step, "loss": loss.item()}
            ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def main() -> None:
    """Start the workers; print the last metrics."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--storage", type=Path, required=True, help="folder that all nodes share, or a bucket"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": args.steps},
        torch_config=TorchConfig(backend="nccl" if torch.cuda.is_available() else "gloo"),
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(name="sharded", storage_path=str(args.storage.resolve())),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()
