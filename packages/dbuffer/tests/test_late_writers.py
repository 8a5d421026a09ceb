"""Memory that something may still write after a failure or a release is never used again, or the write is found."""

import contextlib
import ctypes
import gc
import threading

import torch
import torch.distributed as dist
from dbuffer_helpers import build_large, can_swap, error_of, zero

from dbuffer import Gather, Recycler, ReduceScatter
from dbuffer.transport import transport_of
from dbuffer.transport.peer import direct, peer_memory
from dbuffer.transport.peer.peer_memory import Sum
from ragged_shard.testing import on_ranks


class LateReads:
    """From now on this rank's thread reads too late: after `wait` has lost its patience and raised.

    Attributes:
        into: the addresses that it writes to.
        go: to be set to let it.
        written: set when it has.
    """

    def __init__(self, group):
        self.into: list[int] = []
        self.go, self.written = threading.Event(), threading.Event()
        copy, add = peer_memory.copy_memory, Sum.add

        def late_copy(into, source):
            self._wait([into])
            copy(into, source)
            self.written.set()

        def late_add(total, slices):
            self._wait([receive.data_ptr() for receive, _ in total._pairs])
            with contextlib.suppress(RuntimeError):  # what it adds to has no memory any more
                add(total, slices)
            self.written.set()

        vars(transport_of(group, "peer_memory"))["_peers"][0]._timeout = peer_memory.GRACE = 0.2
        peer_memory.copy_memory, Sum.add = late_copy, late_add

    def _wait(self, addresses):
        self.into += addresses
        self.go.wait(30)


@on_ranks(2)
def test_a_read_that_ends_after_its_wait_gave_up_writes_memory_that_nobody_uses():
    """Rank 1's thread writes when the memory went back."""
    group = dist.new_group()  # of its own: these ranks are not used for another test
    recycler = Recycler("cpu")
    buffer, other = (build_large(name, group, recycler=recycler) for name in "ab")
    Gather([buffer]).start().wait()  # connects
    buffer.release()
    reads = LateReads(group) if dist.get_rank() == 1 else None
    dist.barrier()
    handle = Gather([buffer]).start()
    address = buffer.full[0].data_ptr()
    said = error_of(handle.wait)
    if reads is not None:
        buffer.release()
        recycler.trim()
        other.materialize()
        assert other.full[0].data_ptr() != address
        other.full[0].fill_(7.0)
        reads.go.set()
        assert reads.written.wait(10)
        assert bool((other.full[0] == 7).all())
        assert recycler.stats.quarantined_bytes == other.full[0].nbytes
    dist.barrier()
    gave_up = "rank 1 of the group has ended or given up"
    assert (gave_up, "has not answered for 0.2 s after the timeout")[dist.get_rank()] in said


@on_ranks(2)
def test_late_bytes_of_a_dropped_reduction_are_not_written_over_other_memory():
    """What others give in a reduction arrives in memory of malloc's; rank 1 drops all that it holds, too early."""
    group = dist.new_group()
    direct.MIN_BYTES = 1  # small enough for blocks that malloc hands out again
    buffer = build_large("a", group, rows=16)
    Gather([buffer]).start().wait()
    reads = LateReads(group) if dist.get_rank() == 1 else None
    dist.barrier()
    handle = ReduceScatter([buffer]).start()
    said = error_of(handle.wait)
    if reads is not None:
        size = buffer.shard[0].numel()
        del handle, buffer
        gc.collect()
        after = [torch.full((size,), 7.0) for _ in range(64)]
        assert reads.into
        assert not {tensor.data_ptr() for tensor in after} & set(reads.into)
        reads.go.set()
        assert reads.written.wait(10)
        assert all(bool((tensor == 7).all()) for tensor in after)
    dist.barrier()
    assert said.startswith("reduce_scatter of a failed")


class Late:
    """A transport whose works fail before they have written; `write` writes then."""

    name, address = "late", 0

    def all_gather(self, pairs, label):
        self.address = pairs[0][0].data_ptr()
        return self

    def wait(self):
        raise RuntimeError("a peer died")

    def is_completed(self):
        return True

    def write(self):
        source = torch.full((4,), 9.0)  # held: freed memory may hold the recycler's pattern
        ctypes.memmove(self.address, source.data_ptr(), source.nbytes)


@can_swap
@on_ranks(2)
def test_memory_of_a_failed_collective_is_out_of_use_at_once():
    """Its memory is out of use as soon as `wait` has raised, not only once it is released."""
    late = Late()
    buffer = build_large(transport=lambda _: late, recycler=Recycler("cpu"))
    handle = Gather([buffer]).start()
    assert error_of(handle.wait) == "all_gather of unit failed: a peer died"
    assert "gather it or call materialize first" in error_of(lambda: buffer.views)
    buffer.materialize()
    zero(buffer.full)
    late.write()
    assert not buffer.full[0].any()
    assert buffer.recycler.stats.quarantined_bytes == buffer.full[0].nbytes
