"""The user's random state is the user's: only ops that draw by definition (`uniform_` and the like) advance it."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import ragged_shard
from ragged_shard import RaggedDTensor, RaggedShard, StridedRaggedShard, distribute_tensor
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives, run_ranks, simulated_ranks


def state():
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
    )


@on_ranks(3)
def test_library_calls_leave_the_random_state_of_a_rank_alone(tmp_path):
    before = state()
    mesh = rank_mesh(3)
    full = torch.arange(24.0).view(6, 4)
    param: Any = nn.Parameter(distribute_tensor(full, mesh, [RaggedShard((0,), (1, 2, 3))]))
    RaggedDTensor.from_local(param.to_local().detach(), mesh, param.placements, shape=(6, 4), check=True)
    for placement in (Replicate(), Shard(0), Shard(1), RaggedShard((0, 1), (5, 7, 12)), Partial()):
        param.redistribute(placements=[placement], async_op=True).wait()
    ragged_shard.redistribute(DTensor.from_local(full, mesh, [Replicate()]), placements=param.placements)
    ragged_shard.distribute_like(full, param)
    with record_collectives():
        (param.full_tensor() ** 2).sum().backward()
    nn.utils.clip_grad_norm_([param], 1.0)
    optimizer = torch.optim.AdamW([param])
    optimizer.step()
    copy.deepcopy(param)
    module = nn.Module()
    module.weight = param
    ragged_shard.load_full_state_dict(
        module, ragged_shard.full_state_dict(module, rank0_only=True), rank0_only=True
    )
    saved = ragged_shard.full_optimizer_state_dict(module, optimizer)
    ragged_shard.load_full_optimizer_state_dict(module, optimizer, saved)
    dcp.save({"weight": param}, checkpoint_id=tmp_path)
    dcp.load({"weight": param}, checkpoint_id=tmp_path)
    assert state() == before
    torch.nn.init.uniform_(param)
    assert state() != before


def test_starting_and_simulating_ranks_leaves_the_random_state_alone():
    before = state()
    assert run_ranks(2, dist.get_rank) == [0, 1]
    with simulated_ranks(4):
        mesh = rank_mesh(2, 2)
        distribute_tensor(
            torch.ones(8, 2), mesh, [StridedRaggedShard((0,), (1, 1), 2), Shard(0)]
        ).full_tensor()
    assert state() == before


def draws():
    return torch.rand(1).item()


@pytest.mark.parametrize("seed", [0, 7])
def test_ranks_start_from_the_seed_that_they_are_given(seed):
    torch.manual_seed(seed)
    wanted = torch.rand(1).item()
    assert run_ranks(2, draws, seed=seed) == [wanted] * 2
