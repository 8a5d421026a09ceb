"""Training on CUDA devices over NCCL: one, two and four ranks end where one process ends. Every rank has a device."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import Body, check_training, loss_of, seeded, shard, tokens

from fsdp_runtime import CPUOffloadPolicy
from ragged_shard.testing import RankError, rank_mesh, run_ranks

pytestmark = pytest.mark.gpu

CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "sharded": ((-1,), {}),
    "replicated": ((2, -1), {}),
    "kept": ((-1,), {"reshard_after_forward": False}),
    "kept by two ranks": ((-1,), {"reshard_after_forward": 2}),
    "offloaded": ((-1,), {"offload_policy": CPUOffloadPolicy()}),
}
WIDTH = 64


def devices(*counts):
    """Marks of numbers of ranks, skipped where there are fewer devices."""
    here = torch.cuda.device_count()
    return [
        pytest.param(
            count,
            marks=pytest.mark.skipif(here < count, reason=f"needs {count} CUDA devices; torch sees {here}"),
        )
        for count in counts
    ]


def trains_as_one_process(device, case):
    shape, options = CASES[case]
    ranks = dist.get_world_size()
    sizes = [ranks // (2 if len(shape) == 2 else 1) if size == -1 else size for size in shape]
    names = ("replicate", "shard")[-len(shape) :]
    mesh = dist.device_mesh.init_device_mesh(device, tuple(sizes), mesh_dim_names=names)
    check_training(
        lambda: Body(width=WIDTH).to(device),
        lambda model: shard(model, mesh=mesh, **options),
        lambda model, step, rank: loss_of(model, tokens(step, rank=rank).to(device)),
        rtol=1e-4,
        atol=5e-6,
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", devices(1, 2, 4))
def test_training_over_nccl_ends_where_one_process_ends(ranks, case):
    if ranks < 2 and case in ("replicated", "kept by two ranks"):
        pytest.skip("needs 2 ranks")
    run_ranks(ranks, trains_as_one_process, "cuda", case, device="cuda")


def stepping(device, mesh=None):
    """A function that makes a step on the same batch, and returns the loss."""
    model = shard(seeded(width=WIDTH).to(device), mesh=mesh or rank_mesh(dist.get_world_size()))
    optimizer, batch = torch.optim.AdamW(model.parameters(), lr=0.01), tokens().to(device)

    def step():
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def waits_for_a_rank_that_never_comes(device):
    group = dist.new_group(timeout=timedelta(seconds=10))
    step = stepping(device, dist.device_mesh.DeviceMesh.from_group(group, device))
    step().item()
    if dist.get_rank() == 1:
        time.sleep(600)
    step().item()


@pytest.mark.parametrize("ranks", devices(2, 4))
def test_a_rank_that_never_comes_ends_the_others_after_the_groups_timeout(ranks):
    with pytest.raises(RankError, match=r"rank [023]\b"):
        run_ranks(ranks, waits_for_a_rank_that_never_comes, "cuda", device="cuda", timeout=100)
