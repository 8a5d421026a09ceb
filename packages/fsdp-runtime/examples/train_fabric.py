"""A small model, trained by Lightning Fabric on every GPU of this machine and sharded by fsdp_runtime.

    python train_fabric.py

Next to a script for Fabric with FSDP2 the strategy differs, and what it is told to shard.
"""

import tempfile
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import nn

from fsdp_runtime import block_policies
from fsdp_runtime.integrations.fabric import parallelize, strategy


class Block(nn.Sequential):
    """One unit."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


def make_strategy(ranks: int) -> Any:
    """Fabric's, for models sharded over all ranks; rows stay together in eights."""
    shard = parallelize(Block, block_policy=block_policies.rows(8))
    return strategy(shard, data_parallel_size=ranks, tensor_parallel_size=1)


def train(fabric: Any, folder: str, steps: int = 8) -> list[float]:
    """Train, with a checkpoint half-way that training goes on from. Returns the losses."""
    fabric.seed_everything(0)
    model = fabric.setup_module(nn.Sequential(*(Block(16) for _ in range(3))))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    torch.manual_seed(fabric.global_rank)
    batch = torch.randn(2, 4, 16, device=fabric.device)
    losses = []
    for step in range(steps):
        for number, microbatch in enumerate(batch):
            with fabric.no_backward_sync(model, enabled=number == 0):
                loss = model(microbatch).square().mean() / len(batch)
                fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(fabric.all_reduce(loss.detach())))
        if step == steps // 2:
            state = {"model": model, "optimizer": optimizer, "step": step}
            fabric.save(f"{folder}/half-way", state)
            fabric.load(f"{folder}/half-way", state)
    return losses


if __name__ == "__main__":
    made = Fabric(strategy=make_strategy(max(1, torch.accelerator.device_count())))
    made.launch()
    with tempfile.TemporaryDirectory() as place:
        print(train(made, place))
