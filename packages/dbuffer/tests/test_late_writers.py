"""Memory that something may still write after a failure or a release is never used again, or the write is found."""

import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import build_large, error_of
from torch.distributed.device_mesh import DeviceMesh

from dbuffer import DBuffer, DebugRecycler, Recycler
from dbuffer._torch_compat import CAN_SWAP
from dbuffer.transport import peer_memory, process_memory, transport_of
from layout_planner import TensorSpec, plan
from ragged_shard.testing import run_ranks

can_swap = pytest.mark.skipif(not CAN_SWAP, reason="this torch cannot exchange memory between storages")


def memory_after_a_failure():
    """Rank 0's gather fails; its memory is released and used again; rank 1 must not see what it is used for."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    layout = plan([TensorSpec("w", (1024, 1024))], 2)
    mesh = DeviceMesh.from_group(group, "cpu")
    buffer, other = (DBuffer(layout, mesh, dtype=torch.float32, transport="sends", name=n) for n in "ab")
    dist.barrier()
    if dist.get_rank() == 0:
        handle = buffer.all_gather()
        address = buffer.full[0].data_ptr()
        error_of(handle.wait)
        buffer.release()
        other.materialize()
        assert other.full[0].data_ptr() != address
        assert buffer.memory.recycler.stats.quarantined_bytes == 2 * 4 * 512 * 1024
    dist.barrier()


def test_memory_of_a_failed_send_is_never_used_again():
    run_ranks(2, memory_after_a_failure)


def a_read_begins_before_the_wait_gives_up():
    """Rank 1's thread is about to enter the kernel when its patience ends, and writes when the memory went back."""
    group = dist.new_group()
    recycler = Recycler("cpu")
    buffer, other = (build_large(name, group, recycler=recycler) for name in "ab")
    buffer.all_gather().wait()  # connects
    buffer.release()
    peers = vars(transport_of(group, "peer_memory"))["_mover"]
    usual, grace, written = process_memory.system_call(), peer_memory.GRACE, threading.Event()
    assert usual is not None

    def late(*arguments):
        time.sleep(1.5)
        got = usual(*arguments)
        written.set()
        return got

    if dist.get_rank() == 1:
        peers._timeout = peer_memory.GRACE = 0.2
        process_memory.system_call = lambda: late  # type: ignore[assignment]
    dist.barrier()
    handle = buffer.all_gather()
    address = buffer.full[0].data_ptr()
    said = error_of(handle.wait)
    if dist.get_rank() == 1:
        assert not written.is_set()
        buffer.release()
        recycler.trim()
        other.materialize()
        assert other.full[0].data_ptr() != address
        other.full[0].fill_(7.0)
        assert written.wait(10)
        assert bool((other.full[0] == 7).all())
        assert recycler.stats.quarantined_bytes == other.full[0].nbytes
    peer_memory.GRACE, process_memory.system_call = grace, lambda: usual  # type: ignore[assignment]
    dist.barrier()
    return said


def test_a_read_that_ends_after_its_wait_gave_up_writes_memory_that_nobody_uses():
    first, second = run_ranks(2, a_read_begins_before_the_wait_gives_up)
    assert "rank 1 of the group has ended or given up" in first
    assert "has not answered for 0.2 s after the timeout" in second


class Late:
    """A transport whose works end before they have written; `write` writes then."""

    name = "late"

    def __init__(self, error=None):
        self.error, self.address = error, 0

    def all_gather(self, pairs, label):
        self.address = pairs[0][0].data_ptr()
        return self

    def wait(self):
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self):
        return True

    def write(self):
        source = torch.full((4,), 9.0)  # held: freed memory may hold the recycler's pattern
        peer_memory.read_memory(os.getpid(), source.data_ptr(), self.address, source.nbytes)


def a_late_writer_after_a_failure():
    """Its memory is out of use as soon as `wait` has raised, not only once it is released."""
    late = Late("a peer died")
    buffer = build_large(transport=lambda _: late, recycler=Recycler("cpu"))
    handle = buffer.all_gather()
    assert error_of(handle.wait) == "all_gather of unit failed: a peer died"
    assert "all_gather or materialize first" in error_of(lambda: buffer.views)
    buffer.materialize()
    buffer.zero_("full")
    late.write()
    assert not buffer.full[0].any()
    assert buffer.memory.recycler.stats.quarantined_bytes == buffer.full[0].nbytes


@can_swap
def test_memory_of_a_failed_collective_is_out_of_use_at_once():
    run_ranks(2, a_late_writer_after_a_failure)


def a_late_writer_after_release():
    late, recycler = Late(), DebugRecycler("cpu")
    buffer = build_large(transport=lambda _: late, recycler=recycler)
    buffer.all_gather().wait()
    buffer.release()
    recycler.check()
    writer = threading.Thread(target=late.write)
    writer.start()
    writer.join()
    return error_of(recycler.check)


@can_swap
def test_the_debug_recycler_finds_a_transport_that_writes_after_release():
    for said in run_ranks(2, a_late_writer_after_release):
        assert said.startswith("16 of 4194304 bytes at 0x")
        assert said.endswith("were written after the memory was released, the first at offset 0")
