"""Ranks of one machine read each other's memory, or agree that they cannot."""

import gc
import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dbuffer import _direct, _peer_memory
from dbuffer._peer_memory import connect, read_memory
from ragged_shard.testing import run_ranks

SIZE = 1 << 16


def test_reading_fills_the_tensor():
    source = torch.arange(1000)
    into = torch.zeros_like(source)
    read_memory(os.getpid(), source.data_ptr(), into)
    assert torch.equal(into, source)


def count_calls(monkeypatch):
    """The sizes that the system call is asked for from now on."""
    sizes, usual = [], _peer_memory._reader()

    def counted(process, here, *rest):
        sizes.append(here.size)
        return usual(process, here, *rest)

    monkeypatch.setattr(_peer_memory, "_reader", lambda: counted)
    return sizes


def test_more_than_one_call_can_read_comes_in_several(monkeypatch):
    monkeypatch.setattr(_peer_memory, "_MOST", 3000)
    sizes = count_calls(monkeypatch)
    source = torch.arange(1000)
    into = torch.zeros_like(source)
    read_memory(os.getpid(), source.data_ptr(), into)
    assert torch.equal(into, source)
    assert sizes == [3000, 3000, 2000]


def test_for_no_bytes_nothing_is_read(monkeypatch):
    sizes = count_calls(monkeypatch)
    read_memory(os.getpid(), 0, torch.empty(0))
    assert sizes == []


def test_memory_that_is_not_there_is_an_error():
    with pytest.raises(OSError, match="reading 8 bytes of process"):
        read_memory(os.getpid(), 8, torch.zeros(1, dtype=torch.int64))


def test_where_the_platform_cannot_read_that_is_said(monkeypatch):
    monkeypatch.setattr(_peer_memory.sys, "platform", "darwin")
    monkeypatch.setattr(_peer_memory, "_reader", _peer_memory._reader.__wrapped__)
    with pytest.raises(OSError, match="process_vm_readv"):
        read_memory(os.getpid(), 8, torch.zeros(1))


def error_of(call):
    """What it says when it fails, as it must."""
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value)


def one_may_not_read():
    """Rank 1 is refused the others' memory, as ptrace_scope would."""
    usual = _peer_memory.read_memory

    def refused(*arguments):
        raise OSError(1, "Operation not permitted")

    if dist.get_rank() == 1:
        _peer_memory.read_memory = refused
    _peer_memory._PATIENCE, patience = 0.5, _peer_memory._PATIENCE
    found = connect(dist.group.WORLD)
    _peer_memory.read_memory, _peer_memory._PATIENCE = usual, patience
    whole, mine = torch.zeros(3 * SIZE), torch.full((SIZE,), float(dist.get_rank()))
    _direct._wires[dist.group.WORLD] = found or _direct.Sends(dist.group.WORLD)
    _direct.all_gather([(whole, mine)], dist.group.WORLD).wait()
    _direct._wires.clear()
    return found is None and torch.equal(whole, torch.arange(3.0).repeat_interleave(SIZE))


def test_where_one_rank_may_not_read_all_send():
    assert run_ranks(3, one_may_not_read) == [True] * 3


def others_are_read_while_this_rank_computes():
    """Rank 0 starts and never waits; rank 1 is done all the same."""
    peers, other = connect(dist.group.WORLD), 1 - dist.get_rank()
    mine, theirs = torch.full((SIZE,), float(dist.get_rank())), torch.empty(SIZE)
    work = peers.exchange({other: mine}, {other: theirs})
    if dist.get_rank() == 1:
        work.wait()
        assert bool((theirs == 0).all())
    dist.barrier()
    assert work.is_completed()


def test_an_exchange_is_over_when_all_have_started_it():
    run_ranks(2, others_are_read_while_this_rank_computes)


def sizes_differ():
    peers, other = connect(dist.group.WORLD), 1 - dist.get_rank()
    work = peers.exchange({other: torch.zeros(4)}, {other: torch.zeros(4 + dist.get_rank())})
    said = ""
    if dist.get_rank() == 1:
        said = error_of(work.wait)
    dist.barrier()
    return said


def test_another_size_than_expected_is_an_error_that_says_both():
    assert run_ranks(2, sizes_differ)[1] == "rank 0 of the group: gives 16 bytes; expected 20"


def a_peer_hangs_up():
    """Rank 1 drops its connections, which is what dying does to them."""
    peers, other = connect(dist.group.WORLD), 1 - dist.get_rank()
    if dist.get_rank() == 1:
        del peers
        gc.collect()
        dist.barrier()
        return ["", ""]
    said = []
    first = peers.exchange({other: torch.zeros(4)}, {other: torch.zeros(4)})
    for work in (first, None):
        begin = time.monotonic()
        work = work or peers.exchange({other: torch.zeros(4)}, {other: torch.zeros(4)})
        said.append(error_of(work.wait))
        assert time.monotonic() - begin < 10
    dist.barrier()
    return said


def test_a_peer_that_ends_fails_what_is_under_way_and_what_follows_at_once():
    assert run_ranks(2, a_peer_hangs_up)[0] == ["rank 1 of the group has ended"] * 2


def a_peer_is_late():
    """Rank 1 starts after rank 0 has given up: what it gives is not read any more."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    peers, other = connect(group), 1 - dist.get_rank()
    theirs, said = torch.zeros(4), ""
    if dist.get_rank() == 0:
        said = error_of(peers.exchange({other: torch.ones(4)}, {other: theirs}).wait)
    dist.barrier()
    if dist.get_rank() == 1:
        error_of(peers.exchange({other: torch.ones(4)}, {other: theirs}).wait)
    dist.barrier()
    return said, theirs.sum().item()


def test_a_peer_that_starts_too_late_is_named_and_not_read():
    (said, read), _ = run_ranks(2, a_peer_is_late)
    assert said == "rank(s) [1] of the group did not take part within 1 s"
    assert read == 0


def the_thread_fails():
    """What the kernel gave is no message: the thread ends with an error that nobody foresaw."""
    peers, other = connect(dist.group.WORLD), 1 - dist.get_rank()
    said = []
    if dist.get_rank() == 1:
        dist.barrier()
        peers._sockets[0].send(b"abc")
    else:
        threading.excepthook = lambda arguments: None  # no traceback in the tests' output
        work = peers.exchange({other: torch.zeros(4)}, {other: torch.zeros(4)})
        dist.barrier()
        said = [error_of(attempt) for attempt in (work.wait, lambda: peers.exchange({}, {}))]
        threading.excepthook = threading.__excepthook__
    dist.barrier()
    return said


def test_where_the_answering_thread_fails_nobody_waits_for_it():
    first, second = run_ranks(2, the_thread_fails, timeout=30)[0]
    assert first == "the connections of this rank were closed"
    assert second == "the connections of this rank to the others of the group are closed"


def threads_after(times):
    for _ in range(times):
        peers, other = connect(dist.group.WORLD), 1 - dist.get_rank()
        theirs = torch.zeros(SIZE)
        peers.exchange({other: torch.ones(SIZE)}, {other: theirs}).wait()
        assert bool(theirs.all())
        dist.barrier()
        del peers
    deadline = time.monotonic() + 10
    while any(t.name == "dbuffer peers" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [t.name for t in threading.enumerate() if t.name == "dbuffer peers"]


def test_the_thread_ends_with_the_connections():
    assert run_ranks(2, threads_after, 3) == [[], []]


def many_at_once():
    """Ranks at different paces, several exchanges under way, each of its own size and value."""
    rank, size = dist.get_rank(), dist.get_world_size()
    peers, others = connect(dist.group.WORLD), [r for r in range(size) if r != rank]
    generator = torch.Generator().manual_seed(rank)
    under_way = []
    for number in range(400):
        numel = 1 + number * 37 % 5000
        gives = {r: torch.full((numel,), 1000.0 * number + 10 * rank + r) for r in others}
        takes = {r: torch.zeros(numel) for r in others}
        under_way.append((number, takes, peers.exchange(gives, takes)))
        if torch.rand((), generator=generator) < 0.05:
            time.sleep(0.002)
        while len(under_way) > 5:
            number, takes, work = under_way.pop(0)
            work.wait()
            for r, taken in takes.items():
                assert bool((taken == 1000.0 * number + 10 * r + rank).all()), number
    for *_, work in under_way:
        work.wait()
    dist.barrier()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_many_exchanges_under_way_bring_each_its_own_bytes(ranks):
    run_ranks(ranks, many_at_once, timeout=60)
