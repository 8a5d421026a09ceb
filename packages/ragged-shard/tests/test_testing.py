"""Promises of `ragged_shard.testing`: errors of ranks, counts of collectives, simulated ranks, races."""

import gc
import os
import random
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from ragged_shard import RaggedShard, distribute_tensor
from ragged_shard.device import device_layer
from ragged_shard.testing import (
    RaceError,
    RankError,
    SimulatedDevice,
    on_ranks,
    rank_mesh,
    record_collectives,
    run_ranks,
    simulated_ranks,
)


def draw(scale=1):
    return dist.get_rank(), torch.rand(1).item() * scale, random.random()


def test_results_are_listed_by_rank_and_every_call_starts_from_the_same_seed():
    first = run_ranks(3, draw)
    assert [rank for rank, *_ in first] == [0, 1, 2]
    assert len({tuple(numbers) for _, *numbers in first}) == 1
    assert run_ranks(3, draw) == first
    torch.manual_seed(7)
    assert run_ranks(3, draw, scale=2, seed=7)[2][1] == 2 * torch.rand(1).item()


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_a_decorated_test_runs_on_every_rank_with_its_arguments(ranks, tmp_path):
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == ranks == dist.get_world_size()


@on_ranks(2)
def change_a_variable(monkeypatch):
    monkeypatch.setenv("OF_ONE_TEST", "1")


def test_what_a_test_patches_on_the_ranks_is_undone_there(monkeypatch):
    change_a_variable(monkeypatch=monkeypatch)
    assert run_ranks(2, os.getenv, "OF_ONE_TEST") == [None, None]


def fail(how):
    """What rank 1 does, while rank 0 waits for it."""
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("the reason")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", r"rank 1 of 2 failed[\s\S]*in fail[\s\S]*the reason"),
        ("die", r"rank (0, )?1 of 2 failed[\s\S]*signal 9"),
        ("hang", r"rank 0, 1 of 2 did not answer in 2 s[\s\S]*in fail[\s\S]*in fail"),
    ],
)
def test_a_rank_that_fails_is_named_with_its_stack_and_new_ranks_take_over(how, words):
    before = run_ranks(2, os.getpid)
    with pytest.raises(RankError, match=words) as caught:
        run_ranks(2, fail, how, timeout=2 if how == "hang" else 60)
    assert how != "raise" or isinstance(caught.value.causes[1], ValueError)
    assert not set(before) & set(run_ranks(2, os.getpid))


@on_ranks(3)
def test_collectives_and_their_bytes_are_counted_inside_the_block_only():
    rank, x = dist.get_rank(), torch.ones(6)
    with record_collectives() as record:
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.all_to_all_single(torch.zeros((rank + 1) * 3), torch.ones(6), [rank + 1] * 3, [1, 2, 3])
    dist.all_reduce(x)
    assert record.kinds == ["all_reduce", "broadcast", "all_to_all"]
    assert [event.ranks for event in record.events] == [3] * 3
    sent = [event.bytes_sent for event in record.events]
    assert sent == [pytest.approx(2 * 24 * 2 / 3), 48 * (rank == 0), 4 * (6 - (rank + 1))]


def gather(shard, ranks):
    gathered = torch.empty(ranks * len(shard))
    (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(gathered, shard)
    return gathered


def reduce_scatter(full, ranks, op=dist.ReduceOp.SUM):
    shard = torch.empty(len(full) // ranks)
    (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(shard, full, op=op)
    return shard


def test_every_other_rank_holds_what_this_one_holds():
    def bytes_received():
        return sum(nbytes for _, nbytes in simulation.calls)

    with simulated_ranks(3, rank=1) as simulation:
        assert (dist.get_rank(), dist.get_world_size()) == (1, 3)
        assert gather(torch.tensor([1.0, 2.0]), 3).tolist() == [1, 2] * 3
        assert bytes_received() == 2 * 8
        full = torch.arange(6.0)
        assert reduce_scatter(full, 3).tolist() == [6, 9]  # this rank's slice, three times
        assert bytes_received() == 4 * 8
        assert reduce_scatter(full, 3, dist.ReduceOp.AVG).tolist() == [2, 3]
        summed = torch.ones(2)
        dist.all_reduce(summed)
        dist.all_reduce(summed, op=dist.ReduceOp.MAX)
        dist.broadcast(summed, src=0)
        assert summed.tolist() == [3, 3]
        received = torch.empty(5)
        dist.all_to_all_single(received, torch.tensor([1.0, 2.0]), [2, 1, 2], [1, 0, 1])
        assert received.tolist() == [1, 2, 1, 2, 1]
    assert not dist.is_initialized()
    with simulated_ranks(2, collectives="skip") as simulation:
        dist.all_reduce(values := torch.ones(3))
        assert values.equal(torch.ones(3))
        assert bytes_received() == 12


def test_distributed_tensors_work_on_simulated_ranks():
    with simulated_ranks(6):
        assert rank_mesh(2, 3, names=("a", "b"))["b"].get_group().size() == 3
        theirs = DTensor.from_local(torch.ones(2, 3), rank_mesh(6), [Shard(0)])
        assert theirs.full_tensor().equal(torch.ones(12, 3))
        total: Any = theirs.sum()
        assert total.full_tensor() == 36
        for device in ("cpu", "meta"):
            full = torch.ones(12, 3, device=device)
            ours = distribute_tensor(full, rank_mesh(6), [RaggedShard((0,), (1,) * 6)])
            assert ours.to_local().shape == (2, 3)
            assert device == "meta" or ours.full_tensor().equal(full)


@pytest.fixture
def device():
    with SimulatedDevice() as found:
        assert device_layer("cpu") is found
        yield found
    assert not device_layer("cpu").asynchronous


def test_accesses_of_two_streams_need_an_order_where_they_overlap(device):
    side, x, written = device.new_stream(), torch.zeros(4), device.record()
    x[1:2].add_(1)
    with device.on(side, (written,)):
        x[2:].add_(1)
        with pytest.raises(RaceError, match=r"read .* stream 2 has no order .* write"):
            x[:2].sum()
    device.wait(device.record(side))
    with device.on(side):
        x.sum()
        read = device.record()
    x.sum()  # two reads need no order
    with pytest.raises(RaceError, match=r"write of bytes 4 to 8 .* read of bytes 0 to 16"):
        x[1:2].zero_()
    device.wait(read)
    x.zero_()


def test_memory_dropped_while_another_stream_may_read_it_races(device):
    x = torch.zeros(4)
    with device.on(device.new_stream()):
        x.sum()
    del x
    gc.collect()
    with pytest.raises(RaceError, match="given back at the end of its last tensor"):
        torch.zeros(1)


def test_memory_of_literal_tensors_is_not_that_of_earlier_ones(device):
    with device.on(device.new_stream()):
        for _ in range(50):
            torch.tensor([1.0]).mul_(2)
    for _ in range(50):
        torch.tensor([1.0]).add_(1)  # at an address that the other stream has used


def test_the_host_reads_pinned_memory_only_after_it_waited_for_the_copy(device):
    host = torch.zeros(4, pin_memory=True)
    host.copy_(torch.ones(4), non_blocking=True)
    event = device.record()
    with pytest.raises(RaceError, match="on the host"):
        host.sum()
    device.wait_on_host(event)
    host.sum()


def test_a_simulated_group_works_on_a_stream_of_its_own():
    with SimulatedDevice(), simulated_ranks(4):
        x, out = torch.ones(4), torch.empty(16)
        work = torch.distributed.distributed_c10d._get_default_group().all_gather_single(out, x)
        with pytest.raises(RaceError, match="no order after the write"):
            out.sum()
        work.wait()
        assert out.sum() == 16
