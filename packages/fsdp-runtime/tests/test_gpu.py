"""Training on CUDA devices over NCCL: one, two and four ranks end where one process ends. Every rank has a device."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import loss_of, seeded, shard, tokens

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
STEPS, WIDTH = 4, 64


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


def alone(device, ranks):
    """Losses and last parameters of one process, with the batches of all ranks."""
    model = seeded(width=WIDTH).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        batch = torch.cat([tokens(step, rank=rank) for rank in range(ranks)]).to(device)
        losses.append(_step(model, optimizer, batch))
    return losses, [param.detach() for param in model.parameters()]


def _step(model, optimizer, batch):
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def mesh_of(device, shape):
    ranks = dist.get_world_size()
    names = ("replicate", "shard")[-len(shape) :]
    sizes = [
        ranks // 2 if len(shape) == 2 and size == -1 else ranks if size == -1 else size for size in shape
    ]
    return dist.device_mesh.init_device_mesh(device, tuple(sizes), mesh_dim_names=names)


def trains_as_one_process(device, case):
    shape, options = CASES[case]
    ranks = dist.get_world_size()
    model = shard(seeded(width=WIDTH).to(device), mesh=mesh_of(device, shape), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    expected, params = alone(device, ranks)
    for step in range(STEPS):
        loss = torch.tensor(_step(model, optimizer, tokens(step).to(device)), device=device)
        dist.all_reduce(loss)
        assert loss.item() / ranks == pytest.approx(expected[step], rel=1e-5)
    for param, other in zip(model.parameters(), params, strict=True):
        full = param.full_tensor().to(device)
        assert torch.allclose(full, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", devices(1, 2, 4))
def test_training_over_nccl_ends_where_one_process_ends(ranks, case):
    if ranks < 2 and case in ("replicated", "kept by two ranks"):
        pytest.skip("needs 2 ranks")
    run_ranks(ranks, trains_as_one_process, "cuda", case, device="cuda")


def replays_as_eager_steps(device):
    eager, captured = (
        shard(seeded(width=WIDTH).to(device), mesh=rank_mesh(dist.get_world_size())) for _ in range(2)
    )
    batch = tokens().to(device)

    def optimizer_of(model):
        return torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True)

    optimizer = optimizer_of(eager)
    expected = [_step(eager, optimizer, batch) for _ in range(6)]
    optimizer, found = optimizer_of(captured), []

    def step():
        loss = loss_of(captured, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found += [step().item() for _ in range(2)]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for _ in range(3):
        graph.replay()
        found.append(loss.item())
    found.append(step().item())  # outside again
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("ranks", devices(1, 2, 4))
def test_a_captured_step_replays_as_eager_steps_go(ranks):
    run_ranks(ranks, replays_as_eager_steps, "cuda", device="cuda")


def waits_for_a_rank_that_never_comes(device):
    group = dist.new_group(timeout=timedelta(seconds=10))
    mesh = dist.device_mesh.DeviceMesh.from_group(group, device)
    model = shard(seeded(width=WIDTH).to(device), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(model, optimizer, tokens().to(device))
    if dist.get_rank() == 1:
        time.sleep(600)
    _step(model, optimizer, tokens().to(device))


@pytest.mark.parametrize("ranks", devices(2, 4))
def test_a_rank_that_never_comes_ends_the_others_after_the_groups_timeout(ranks):
    with pytest.raises(RankError, match=r"rank [023]\b"):
        run_ranks(ranks, waits_for_a_rank_that_never_comes, "cuda", device="cuda", timeout=100)
