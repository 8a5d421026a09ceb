"""All that ragged tensors do, on gloo ranks and on GPUs."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from ragged_shard import RaggedDTensor, RaggedShard, distribute_like, distribute_tensor
from ragged_shard.state_dict import full_state_dict, load_full_state_dict
from ragged_shard.testing import accelerator_groups, on_ranks, rank_mesh, run_ranks

UNITS = {1: (1,), 2: (1, 3), 3: (3, 0, 1), 4: (1, 0, 2, 1)}


def everything(device, folder):
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device, (ranks,))
    full = torch.arange(48.0, device=device).view(8, 6) / 48
    ragged = RaggedShard((0,), UNITS[ranks])
    start = distribute_tensor(full, mesh, [ragged])
    assert start.device.type == device
    tensor = start
    other = RaggedShard((0,), (2, 1, 1) if ranks == 3 else (1,) * ranks)
    one_hot = RaggedShard((0, 1), (0,) * (ranks - 1) + (1,))
    targets = [Replicate(), ragged, other, Shard(1), one_hot, Shard(0), ragged]
    for target in targets:
        tensor = tensor.redistribute(placements=[target], async_op=True).wait()
        torch.testing.assert_close(tensor.full_tensor(), full)
    mask = distribute_tensor(full > 0.5, mesh, [ragged])
    assert torch.equal(mask.redistribute(placements=[Shard(0)]).full_tensor(), full > 0.5)
    every: list[dict] = [{"foreach": True}, {"fused": True}, {"foreach": False}]
    for options in every:
        plain: Any = nn.Parameter(full.clone())
        param: Any = nn.Parameter(start.clone())
        for p in (plain, param):
            optimizer = torch.optim.AdamW([p], lr=0.1, **options)
            scaler = torch.amp.GradScaler(device, init_scale=8.0)
            scaler.scale(torch.ones((), device=device))
            p.grad = distribute_like(full * 8, p)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([p], 0.5)
            scaler.step(optimizer)
            scaler.update()
        torch.testing.assert_close(param.full_tensor(), plain.detach(), rtol=1e-6, atol=1e-7)
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros_like(start))
    load_full_state_dict(module, {"weight": full.cpu()} if dist.get_rank() == 0 else {}, rank0_only=True)
    assert torch.equal(full_state_dict(module, cpu_offload=True)["weight"], full.cpu())
    dcp.save({"w": start}, checkpoint_id=folder)
    loaded = {"w": distribute_tensor(torch.zeros_like(full), mesh, [RaggedShard((0, 1), UNITS[ranks])])}
    dcp.load(loaded, checkpoint_id=folder)
    assert torch.equal(loaded["w"].full_tensor(), full)
    assert start.cpu().to_local().device.type == "cpu"


def test_everything_works_on_cpu_with_gloo(tmp_path):
    run_ranks(3, everything, "cpu", tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_everything_works_on_gpus_with_nccl(ranks, tmp_path):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices: NCCL takes one rank for each")
    run_ranks(ranks, everything, "cuda", tmp_path, device="cuda", timeout=120)


@on_ranks(3)
def test_tensors_in_cpu_memory_travel_over_groups_that_move_none_of_it():
    mesh, full = rank_mesh(3), torch.arange(48.0).view(8, 6) / 48
    uneven, even = RaggedShard((0,), (3, 0, 1)), RaggedShard((0, 1), (1, 1, 1))
    last = RaggedShard((0,), (0, 0, 1))
    with accelerator_groups():
        for start in (uneven, even, last):
            tensor = distribute_tensor(full, mesh, [start], src_data_rank=None)
            for target in (Replicate(), uneven, even, last):
                moved = tensor.redistribute(placements=[target])
                assert moved.device.type == "cpu"
                assert moved.full_tensor().equal(full)
            assert tensor.amax().item() == full.amax()
            assert tensor.sum().item() == pytest.approx(full.sum().item())
            assert torch.linalg.vector_norm(tensor).item() == pytest.approx(full.norm().item())
            assert torch.equal(tensor, tensor.clone())
            found = torch.zeros(1)
            spoiled = tensor.clone()
            spoiled.to_local()[:1] = torch.inf  # on ranks that hold a row
            torch._amp_foreach_non_finite_check_and_unscale_([spoiled], found, torch.ones(1))
            assert found == 1
        summand = RaggedDTensor.from_local(full.clone(), mesh, [Partial()], shape=full.shape)
        for target in (even, uneven):
            assert summand.redistribute(placements=[target]).full_tensor().equal(3 * full)
