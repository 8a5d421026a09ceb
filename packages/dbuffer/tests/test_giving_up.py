"""Ranks that are late, stopped, stuck or killed: the others raise, and nobody touches what has changed hands."""

import contextlib
import os
import signal
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import SIZE, error_of, peers_of, swap

from dbuffer.transport.peer import peer_memory
from dbuffer.transport.peer.peer_memory import Sum
from ragged_shard.testing import RankError, on_ranks, run_ranks


def reduction(peers, numel):
    """Start to add up what all ranks give."""
    rank, size = dist.get_rank(), dist.get_world_size()
    others = [(rank - step) % size for step in range(1, size)]
    total = Sum([(torch.zeros(numel), torch.ones(numel))], others, "sum")
    gives = {other: [torch.ones(numel)] for other in others}
    return peers.exchange("x", gives, dict.fromkeys(others, total.own), total)


def one_of_three_is_missing():
    """Ranks 0 and 1 start to reduce: rank 0 would add what rank 2 gives first, so it does not read rank 1's yet."""
    peers = peers_of(timeout=1.0)
    said = error_of(reduction(peers, 4).wait) if dist.get_rank() != 2 else ""
    dist.barrier()
    return said


def test_ranks_that_wait_themselves_are_not_named_as_missing():
    said = run_ranks(3, one_of_three_is_missing)[:2]
    assert "rank(s) [2] of the group did not take part in x within 1 s" in said
    assert all("[2]" in one or "has ended or given up" in one for one in said), said


def slow_reads(pause, progress=None):
    """From now on a read stops half-way for so many seconds."""
    usual = peer_memory.copy_memory

    def slow(into, source):
        half = source.numel() // 2
        usual(into, source[:half])
        time.sleep(pause)
        usual(into + source[:half].nbytes, source[half:])
        if progress is not None:
            progress.append("read")

    peer_memory.copy_memory = slow
    return usual


@on_ranks(2)
def test_what_is_read_from_a_peer_that_has_given_up_is_an_error_not_a_value():
    """Rank 0 gives up and uses its memory for something else while rank 1 is still reading it."""
    peers = peers_of(timeout=1.0 if dist.get_rank() == 0 else 30.0)
    mine, theirs = torch.full((SIZE,), 5.0), torch.zeros(SIZE)
    usual = slow_reads(3.0 if dist.get_rank() == 1 else 0.0)
    work = swap(peers, mine, [theirs])
    said = error_of(work.wait)
    mine.fill_(-1.0)
    assert work.quiet
    dist.barrier()
    peer_memory.copy_memory = usual
    gave_up = "rank(s) [1] of the group did not take part in x within 1 s"
    assert said == (gave_up, "rank 0 of the group has ended or given up, during x")[dist.get_rank()]


@on_ranks(2)
def test_wait_does_not_return_while_the_thread_still_writes():
    """Rank 0's time is up while its own thread writes its memory: it may not have the memory back before."""
    progress: list = []
    peers = peers_of(timeout=3.0 if dist.get_rank() == 0 else 30.0)
    usual = slow_reads(3.2 if dist.get_rank() == 0 else 0.0, progress)
    dist.barrier()
    work = swap(peers, torch.ones(SIZE), [torch.zeros(SIZE)])
    with contextlib.suppress(RuntimeError):
        work.wait()
    assert progress == ["read"]
    dist.barrier()
    peer_memory.copy_memory = usual


@on_ranks(2)
def test_a_rank_whose_thread_is_stuck_hangs_up_before_its_wait_raises(tmp_path):
    """Rank 0's thread is in a long read when its patience ends; rank 1 reads what rank 0 gave after that."""
    peers = peers_of(timeout=1.5 if dist.get_rank() == 0 else 30.0)
    usual, done = peer_memory.copy_memory, tmp_path / "done"

    def slow(*arguments):
        until = time.monotonic() + 60
        while not done.exists() and time.monotonic() < until:
            time.sleep(0.01)
        usual(*arguments)

    mine, theirs = torch.full((SIZE,), 5.0), torch.zeros(SIZE)
    dist.barrier()
    with mock.patch.multiple(peer_memory, copy_memory=slow, GRACE=0.3):
        work = swap(peers, mine, [theirs])
        said = error_of(work.wait)
        quiet = work.quiet
        mine.fill_(-1.0)
        if dist.get_rank() == 0:
            done.touch()
        dist.barrier()
    if dist.get_rank():
        assert said == "rank 0 of the group has ended or given up, during x"
    else:
        assert said.startswith(
            "the thread that exchanges memory has not answered for 0.3 s after the timeout"
        )
        assert not quiet


def all_pids():
    pids: Any = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    return pids


def one_is_frozen():
    """Rank 1 is stopped by a signal in the middle; rank 0 gives up, changes its memory and lets it go on."""
    peers, size = peers_of(timeout=2.0), dist.get_world_size()
    mine, theirs = torch.full((SIZE,), float(dist.get_rank() + 1)), [torch.zeros(SIZE)] * (size - 1)
    pids = all_pids()
    if dist.get_rank() == 0:
        for other in range(1, size):  # which may still be in that gather, and need rank 1 to leave it
            dist.recv(torch.zeros(1), other)
        os.kill(pids[1], signal.SIGSTOP)
        said = error_of(swap(peers, mine, theirs).wait)
        mine.fill_(-1.0)
        os.kill(pids[1], signal.SIGCONT)
    else:
        dist.send(torch.zeros(1), 0)
        time.sleep(0.5)
        said = error_of(swap(peers, mine, theirs).wait)
    dist.barrier()
    return said


@pytest.mark.parametrize("ranks", [2, pytest.param(8, marks=pytest.mark.long)])
def test_a_frozen_peer_fails_all(ranks):
    said = run_ranks(ranks, one_is_frozen)
    assert said[0] == "rank(s) [1] of the group did not take part in x within 2 s"
    for other in said[1:]:
        assert "rank(s) [1] of" in other or "given up" in other or "closed" in other


def one_is_killed(when):
    """Rank 2 is killed in a read of its own, or while rank 0 reads from it, or while rank 0 adds up what it gives."""
    peers, size, pids = peers_of(), dist.get_world_size(), all_pids()
    usual, add, rank = peer_memory.copy_memory, Sum.add, dist.get_rank()
    killed = peers._answering._peers[2].memory if rank == 0 else None

    def kill():
        os.kill(pids[2], signal.SIGKILL)
        time.sleep(0.2)

    def deadly(into, source):
        if rank == 2 and when == "it reads":
            kill()
        usual(into, source)
        if when == "it is read" and killed and 0 <= source.data_ptr() - killed.address < killed.size:
            kill()
            usual(into, source)  # a mapping stays

    def deadly_add(total, slices):
        if rank == 0:
            kill()
        add(total, slices)  # the memory stays

    peer_memory.copy_memory, Sum.add = deadly, deadly_add
    if when == "its gradients are added up":
        work = reduction(peers, SIZE)
    else:
        work = swap(peers, torch.ones(SIZE), [torch.zeros(SIZE)] * (size - 1))
    work.wait()
    if rank == 2:
        time.sleep(10)  # it may have all it needs before it is killed


@pytest.mark.parametrize("when", ["it reads", "it is read", "its gradients are added up"])
def test_where_a_rank_is_killed_the_others_raise_at_once(when):
    with pytest.raises(RankError) as caught:
        run_ranks(3, one_is_killed, when)
    assert "rank 2 ---\nthe process died (signal 9)" in str(caught.value)
    assert 0 in caught.value.causes
    for cause in caught.value.causes.values():
        assert "of the group" in str(cause)  # rank 2, or the one that has seen it first and given up
        assert "ended or given up, during x" in str(cause)
