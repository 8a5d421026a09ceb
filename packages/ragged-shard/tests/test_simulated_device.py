"""The simulated device finds races; waits of the host are counted; streams and events of any device."""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from ragged_shard import (
    RaggedShard,
    device_layer,
    distribute_like,
    distribute_tensor,
    full_state_dict,
    load_full_state_dict,
)
from ragged_shard.testing import (
    CaptureError,
    OnItsWay,
    RaceError,
    SimulatedDevice,
    host_waits,
    run_ranks,
    simulated_ranks,
)


@pytest.fixture
def device():
    with SimulatedDevice() as found:
        yield found


def test_it_is_the_layer_of_the_cpu_inside():
    with SimulatedDevice() as device:
        assert device_layer("cpu") is device
    assert not device_layer("cpu").asynchronous


def test_a_read_on_another_stream_needs_an_event_after_the_write(device):
    side, x = device.new_stream(), torch.zeros(4)
    written = device.record()
    x.add_(1)
    with (
        device.on(side, (written,)),
        pytest.raises(RaceError, match=r"read .* stream 2 has no order .* write"),
    ):
        x.sum()
    with device.on(side):
        x.sum()
    device.wait(device.record(side))


def test_a_write_needs_an_order_after_a_read_and_two_reads_need_none(device):
    side, x = device.new_stream(), torch.zeros(4)
    with device.on(side):
        x.sum()
        read = device.record()
    x.sum()
    with pytest.raises(RaceError, match=r"write of bytes 4 to 8 .* read of bytes 0 to 16"):
        x[1:2].zero_()
    device.wait(read)
    x.zero_()


def test_disjoint_slices_of_one_storage_do_not_conflict(device):
    side, x = device.new_stream(), torch.zeros(4)
    with device.on(side):
        x[:2].add_(1)
    x[2:].add_(1)
    device.wait(device.record(side))


def test_memory_dropped_while_another_stream_may_read_it_races(device):
    side, x = device.new_stream(), torch.zeros(4)
    with device.on(side):
        x.sum()
    del x
    gc.collect()
    with pytest.raises(RaceError, match="given back at the end of its last tensor"):
        torch.zeros(1)


def test_memory_of_another_streams_pool_needs_an_order_after_its_allocation(device):
    side = device.new_stream()
    with device.on(side):
        x = torch.empty(4)
    with pytest.raises(RaceError, match="no order after the write of bytes 0 to 16 by the allocation"):
        x.zero_()


def test_the_host_reads_pinned_memory_only_after_it_waited_for_the_copy(device):
    x, host = torch.ones(4), torch.zeros(4, pin_memory=True)
    host.copy_(x, non_blocking=True)
    event = device.record()
    for read in (host.sum, host[0].item):
        with pytest.raises(RaceError, match="on the host"):
            read()
    device.wait_on_host(event)
    host.sum()
    pageable = host + 1
    pageable.copy_(x, non_blocking=True)  # blocks all the same
    pageable.sum()


def test_gradients_of_the_autograd_engine_are_checked_too(device):
    side, w = device.new_stream(), torch.ones(4, requires_grad=True)
    loss = (w * w).sum()
    with device.on(side):
        w.data.add_(1)  # so that autograd does not see it
    with pytest.raises(RaceError, match=r"read .* by aten.mul"):
        loss.backward()
    device.wait(device.record(side))


def test_a_capture_refuses_what_a_graph_cannot_record(device):
    x, before, host = torch.ones(4), device.record(), torch.zeros(4) + 0
    pinned, default = torch.zeros(4, pin_memory=True), device.current_stream()
    for act, match in (
        (device.synchronize, "synchronizes"),
        (before.query, "asks whether an event"),
        (lambda: float(x.sum()), "waits for the current stream"),
        (lambda: device.wait(before), "from outside"),
        (lambda: (pinned + 0).copy_(x), "runs aten.add|pageable"),
        (lambda: device.wait(device.record(), default), "default stream cannot"),
    ):
        with pytest.raises(CaptureError, match=match), device.capture():
            act()
    with pytest.raises(CaptureError, match="default stream cannot"), device.capture(default):
        pass
    with device.capture():
        captured = device.current_stream()
        with device.on(device.new_stream()):
            pinned.copy_(x, non_blocking=True)
            host.add_(1)
            device.wait(device.record(), captured)


def test_an_event_that_a_graph_recorded_is_of_no_use_after_the_capture(device):
    with device.capture():
        event = device.record()
    for use in (lambda: device.wait(event), event.query, event.synchronize):
        with pytest.raises(CaptureError, match="after the capture"):
            use()


def test_a_capture_tells_the_addresses_of_memory_from_outside(device):
    x = torch.ones(4)
    with device.capture() as first:
        (x + 1).mul_(2)
    with device.capture() as second:
        (x + 1).mul_(2)
    assert first == second == [x.data_ptr()]


def test_pools_reserve_the_sum_of_the_streams_peaks(device):
    with device.on(device.new_stream()):
        torch.empty(100)
    torch.empty(50)
    assert device.pools.reserved == 600
    assert set(device.pools.used.values()) == {0}


def test_a_simulated_group_works_on_a_stream_of_its_own():
    with SimulatedDevice(), simulated_ranks(4):
        x, out = torch.ones(4), torch.empty(16)
        work = torch.distributed.distributed_c10d._get_default_group().all_gather_single(out, x)
        with pytest.raises(RaceError, match="no order after the write"):
            out.sum()
        work.wait()
        assert out.sum() == 16


@pytest.mark.parametrize("kind", ["largest", "average", "broadcast"])
def test_results_that_equal_what_was_there_are_written_all_the_same(kind):
    with SimulatedDevice(), simulated_ranks(2, rank=1):
        x = torch.ones(4)
        if kind == "broadcast":
            work = dist.broadcast(x, 0, async_op=True)
        else:
            op = dist.ReduceOp.MAX if kind == "largest" else dist.ReduceOp.AVG
            work = dist.all_reduce(x, op, async_op=True)
        with pytest.raises(RaceError):
            x.sum()
        work.wait()
        assert x.sum() == 4


WAITS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x[0] > 0),
    "float": lambda x: float(x.max()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: (x + 1).cpu(),
    "equal": lambda x: torch.equal(x, x + 1),
    "nonzero": lambda x: (x > 0).nonzero(),
    "unique": lambda x: x.unique(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "mask": lambda x: x[x > 0],
    "mask assigned": lambda x: (x * 1).__setitem__(x > 0, x.new_zeros(())),
    "eigh": lambda x: torch.linalg.eigh(x.outer(x)),
    "pageable copy": lambda x: x.copy_(torch.tensor([1.0, 2.0, 3.0])),
    "after a foreach op": lambda x: torch._foreach_add([x], 1.0)[0].tolist(),
    "after a view": lambda x: x.view(3, 1)[1].item(),
    "after out=": lambda x: torch.mul(x, 2, out=torch.empty(3)).tolist(),
}


def test_a_wait_is_found_where_it_is_called():
    for case, wait in WAITS.items():
        x = torch.tensor([1.0, -2.0, 3.0])
        with host_waits([x]) as waits:
            wait(x)
        assert waits.lines, case
        assert all(line.endswith(")") and "test_simulated_device.py" in line for line in waits.lines), case


def test_what_stays_on_the_device_or_on_the_host_is_no_wait():
    x, count = torch.tensor([1.0, -2.0, 3.0], requires_grad=True), torch.zeros(())
    with host_waits([x]) as waits:
        torch.where(x > 0, x, 0).square().sum().backward()
        x.detach().clamp_(min=0).add_(torch.ones(3))
        count += 1
        assert count.item() == 1
        flag = OnItsWay(x.isfinite().all())
        assert flag.has_arrived()
        assert flag.read().item()
    assert waits.lines == []


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
    targets = [Replicate(), ragged, Partial(), other, Shard(1), one_hot, Partial("avg"), Shard(0), ragged]
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
