"""Tensor parallelism of degree 1 under fully_shard."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_runtime import fully_shard
from layout_planner import Rows
from ragged_shard.testing import on_ranks, rank_mesh


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x):
        return self.down(self.up(x).relu()).pow(2).mean()


@on_ranks(2)
def test_tensor_parallelism_of_degree_1_trains_as_without():
    mesh = rank_mesh(2, 1, names=("dp", "tp"))
    model: Any = Net()
    reference = Net()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"], block_policy=lambda name, param: Rows(3))
    x = torch.randn(4, 16)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, reference)]
    for _ in range(3):
        for optimizer, m in zip(optimizers, (model, reference), strict=True):
            m(x).backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), expected, msg=name)
