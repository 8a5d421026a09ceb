"""Expert parallelism, and units whose parameters lie on several meshes."""

from typing import Any

import torch
import torch.distributed as dist
from harness import RANKS, Outcome, case, rows_of, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

DATA = "Data parallelism alone"


class Stack(nn.Module):
    """Three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 52), nn.Tanh(), nn.Linear(52, 32)) for _ in range(3)
        )
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        found: torch.Tensor = self.head(x)
        return found


def rows(step: int) -> torch.Tensor:
    """The whole batch of a step."""
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(step))


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The loss."""
    found: torch.Tensor = model(x).square().mean()
    return found


@case(DATA, "four units on one axis", counts={"all_gather": 7, "reduce_scatter": 4, "all_reduce": 1})
def one_axis(fsdp: Any) -> Outcome:
    def wrap(fsdp: Any, model: Any) -> None:
        mesh = init_device_mesh("cpu", (RANKS,))
        for block in model.blocks:
            fsdp.fully_shard(block, mesh=mesh)
        fsdp.fully_shard(model, mesh=mesh)

    return train(fsdp, Stack, wrap, mean_square, batches=rows, share=rows_of(dist.get_rank(), RANKS))
