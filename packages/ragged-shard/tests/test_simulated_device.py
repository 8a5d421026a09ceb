"""The simulated device raises where memory is used without an order, and only there."""

import gc

import pytest
import torch
import torch.distributed as dist

from ragged_shard import device_layer
from ragged_shard.testing import CaptureError, RaceError, SimulatedDevice, simulated_ranks


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
    with pytest.raises(RaceError, match="on the host"):
        host.sum()
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
    pinned = torch.zeros(4, pin_memory=True)
    for act, match in (
        (device.synchronize, "synchronizes"),
        (before.query, "asks whether an event"),
        (lambda: float(x.sum()), "waits for the current stream"),
        (lambda: device.wait(before), "from outside"),
        (lambda: (pinned + 0).copy_(x), "runs aten.add|pageable"),
    ):
        with pytest.raises(CaptureError, match=match), device.capture():
            act()
    with device.capture(), device.on(device.new_stream()):
        pinned.copy_(x, non_blocking=True)
        host.add_(1)
        device.wait(device.record(), device._default)


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
