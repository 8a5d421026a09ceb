"""All that ragged tensors do, on gloo ranks and on GPUs."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from ragged_shard import RaggedShard, distribute_like, distribute_tensor
from ragged_shard.state_dict import full_state_dict, load_full_state_dict
from ragged_shard.testing import run_ranks

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
