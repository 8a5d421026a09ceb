"""Ranks of one machine read each other's memory, or agree that they cannot; and no fault gives a wrong value."""

import contextlib
import gc
import logging
import os
import random
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import mesh_of
from torch.distributed.device_mesh import DeviceMesh

import dbuffer
from dbuffer import DBuffer
from dbuffer.transport import handshake, peer_memory, process_memory, transport_of
from dbuffer.transport.handshake import connect
from dbuffer.transport.peer_memory import PeerMemory
from dbuffer.transport.process_memory import read_memory
from dbuffer.transport.sends import Sends
from layout_planner import TensorSpec, plan
from ragged_shard.testing import run_ranks

SIZE = 1 << 16


# -- reading -----------------------------------------------------------------------------------------------------------


def read_own(source, into):
    read_memory(os.getpid(), source.data_ptr(), into.data_ptr(), into.nbytes)


def test_reading_fills_the_tensor():
    source = torch.arange(1000)
    into = torch.zeros_like(source)
    read_own(source, into)
    assert torch.equal(into, source)


def count_calls(monkeypatch):
    """The sizes that the system call is asked for from now on."""
    sizes, usual = [], process_memory.system_call()
    assert usual is not None

    def counted(process, here, *rest):
        sizes.append(here.size)
        return usual(process, here, *rest)

    monkeypatch.setattr(process_memory, "system_call", lambda: counted)
    return sizes


def test_more_than_one_call_can_read_comes_in_several(monkeypatch):
    monkeypatch.setattr(process_memory, "MOST", 3000)
    sizes = count_calls(monkeypatch)
    source = torch.arange(1000)
    into = torch.zeros_like(source)
    read_own(source, into)
    assert torch.equal(into, source)
    assert sizes == [3000, 3000, 2000]


def test_for_no_bytes_nothing_is_read(monkeypatch):
    sizes = count_calls(monkeypatch)
    read_own(torch.empty(0), torch.empty(0))
    assert sizes == []


def test_memory_that_is_not_there_is_an_error():
    into = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(OSError, match="reading 8 bytes of process"):
        read_memory(os.getpid(), 8, into.data_ptr(), 8)


def test_where_the_platform_cannot_read_that_is_said(monkeypatch):
    monkeypatch.setattr(process_memory.sys, "platform", "darwin")
    monkeypatch.setattr(process_memory, "system_call", process_memory.system_call.__wrapped__)
    with pytest.raises(OSError, match="process_vm_readv"):
        read_memory(os.getpid(), 8, 8, 8)


# -- connecting --------------------------------------------------------------------------------------------------------


def peers_of(group=None, timeout=30.0):
    peers, trouble = connect(group or dist.group.WORLD)  # type: ignore[arg-type]
    assert not trouble, trouble
    return PeerMemory(peers, timeout)


def error_of(call):
    """What it says when it fails, as it must."""
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value)


def one_may_not_read():
    """Rank 1 is refused the others' memory, as ptrace_scope would."""
    usual, lines = handshake.read_memory, []

    def refused(*arguments):
        raise OSError(1, "Operation not permitted")

    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("dbuffer.transport")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    if dist.get_rank() == 1:
        handshake.read_memory = refused
    group = dist.new_group()
    full, mine = torch.zeros(3 << 18), torch.full((1 << 18,), float(dist.get_rank()))
    transport = transport_of(group, "auto")
    transport.all_gather([(full, mine)], "x").wait()
    handshake.read_memory = usual
    logger.removeHandler(handler)
    assert isinstance(vars(transport)["_mover"], Sends)
    assert torch.equal(full, torch.arange(3.0).repeat_interleave(1 << 18))
    (line,) = lines
    return line.split(": ", 1)[1]


def test_where_one_rank_may_not_read_all_send_and_say_why():
    for line in run_ranks(3, one_may_not_read):
        assert line.startswith(
            "sends for large exchanges; no peer memory: rank 1: may not read rank 0's memory (Operation not permitted; "
        )


def one_cannot_be_reached():
    """Rank 0's socket is not there for the others, as in another network namespace."""
    usual = handshake._listen

    def elsewhere():
        listener, name, trouble = usual()
        return listener, name + "x", trouble

    if dist.get_rank() == 0:
        handshake._listen = elsewhere
    patience, handshake.PATIENCE = handshake.PATIENCE, 0.5
    peers, trouble = connect(dist.group.WORLD)  # type: ignore[arg-type]
    handshake._listen, handshake.PATIENCE = usual, patience
    assert peers == {}
    return trouble


def test_where_one_rank_cannot_be_reached_all_agree_and_say_why():
    for trouble in run_ranks(3, one_cannot_be_reached):
        assert trouble == (
            "rank 1: cannot reach rank 0 by a local socket (Connection refused): another machine or another network "
            "namespace"
        )


def chosen_where_it_cannot_be():
    usual, handshake.system_call = handshake.system_call, lambda: None  # type: ignore[assignment]
    group = dist.new_group()
    full, mine = torch.zeros(2 << 18), torch.zeros(1 << 18)
    try:
        with pytest.raises(ValueError, match=r"'peer_memory' is not possible .* no process_vm_readv"):
            transport_of(group, "peer_memory").all_gather([(full, mine)], "x")
    finally:
        handshake.system_call = usual


def test_a_choice_by_name_that_is_not_possible_raises_on_all_ranks():
    run_ranks(2, chosen_where_it_cannot_be)


def random_states():
    random.seed(3)
    torch.manual_seed(3)
    before = random.getstate(), torch.get_rng_state()
    peers_of()
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_connecting_leaves_the_users_random_numbers_alone():
    run_ranks(2, random_states)


# -- exchanging --------------------------------------------------------------------------------------------------------


def swap(peers, gives, takes, label="x"):
    """Start an exchange with the one other rank."""
    other = 1 - dist.get_rank()
    return peers.exchange(label, {other: [gives]}, {other: [takes]})


def others_are_read_while_this_rank_computes():
    """Rank 0 starts and never waits; rank 1 is done all the same."""
    peers = peers_of()
    mine, theirs = torch.full((SIZE,), float(dist.get_rank())), torch.empty(SIZE)
    work = swap(peers, mine, theirs)
    if dist.get_rank() == 1:
        work.wait()
        assert bool((theirs == 0).all())
    dist.barrier()
    assert work.is_completed()


def test_an_exchange_completes_when_all_have_started_it():
    run_ranks(2, others_are_read_while_this_rank_computes)


def many_at_once():
    """Ranks at different paces, several exchanges under way, each of its own size and value."""
    rank, size = dist.get_rank(), dist.get_world_size()
    peers, others = peers_of(), [r for r in range(size) if r != rank]
    generator = torch.Generator().manual_seed(rank)
    under_way = []
    for number in range(400):
        numel = 1 + number * 37 % 5000
        gives = {r: [torch.full((numel,), 1000.0 * number + 10 * rank + r)] * 2 for r in others}
        takes = {r: [torch.zeros(numel), torch.zeros(numel)] for r in others}
        under_way.append((number, takes, peers.exchange(f"n{number}", gives, takes)))
        if torch.rand((), generator=generator) < 0.05:
            time.sleep(0.002)
        while len(under_way) > 5:
            number, takes, work = under_way.pop(0)
            work.wait()
            for r, taken in takes.items():
                assert all((t == 1000.0 * number + 10 * r + rank).all() for t in taken), number
    for *_, work in under_way:
        work.wait()
    dist.barrier()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_many_exchanges_under_way_bring_each_its_own_bytes(ranks):
    run_ranks(ranks, many_at_once, timeout=60)


def many_buffers(count):
    """One call with so many buffers that what is said of them fills the sockets many times."""
    mesh, layout = mesh_of(), plan([TensorSpec("w", (1024,))], dist.get_world_size())
    buffers = [
        DBuffer(layout, mesh, dtype=torch.float32, check_ranks=False, name=f"b{i}", transport="peer_memory")
        for i in range(count)
    ]
    for index, buffer in enumerate(buffers):
        buffer.load_full({"w": torch.full((1024,), float(index))})
    for _ in range(3):
        dbuffer.all_gather(buffers).wait()
        assert all(bool((b.full[0] == index).all()) for index, b in enumerate(buffers))
        dbuffer.reduce_scatter(buffers).wait()
        assert all(bool((b.shard[0] == index).all()) for index, b in enumerate(buffers))
        for buffer in buffers:
            buffer.release()


@pytest.mark.parametrize("count", [700, 4500])
def test_a_call_with_very_many_buffers_completes(count):
    run_ranks(2, many_buffers, count, timeout=120)


# -- ranks that disagree -----------------------------------------------------------------------------------------------


def disagree(what):
    """Rank 1 calls for something else; each rank's own error."""
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=20))
    mesh, layout = DeviceMesh.from_group(group, "cpu"), plan([TensorSpec("w", (1024, 1024))], 2)
    options = {"dtype": torch.float32, "check_ranks": False, "transport": what[1]}
    first, second = (DBuffer(layout, mesh, name=name, **options) for name in ("first", "second"))
    larger = DBuffer(plan([TensorSpec("w", (2048, 1024))], 2), mesh, name="first", **options)
    for buffer in (first, second, larger):
        buffer.materialize()
    other = {
        "reduces": first.reduce_scatter,
        "averages": lambda: first.reduce_scatter(op="sum"),
        "names another": second.all_gather,
        "gathers more": larger.all_gather,
        "gathers two": lambda: dbuffer.all_gather([first, second]),
    }[what[0]]
    usual = first.all_gather if what[0] != "averages" else first.reduce_scatter
    begin = time.monotonic()
    handle = (usual, other)[rank]()
    message = error_of(handle.wait)
    assert time.monotonic() - begin < 15
    return message


@pytest.mark.parametrize("transport", ["sends", "peer_memory"])
@pytest.mark.parametrize("what", ["reduces", "averages", "names another", "gathers more", "gathers two"])
def test_ranks_that_exchange_different_things_all_raise(what, transport):
    for rank, message in enumerate(run_ranks(2, disagree, (what, transport))):
        assert f"rank {1 - rank} of the group takes part in" in message
        assert "all ranks must make the same calls in the same order" in message


# -- faults ------------------------------------------------------------------------------------------------------------


def a_peer_hangs_up():
    """Rank 1 drops its connections, which is what dying does to them; a child that it forked lives on."""
    peers = peers_of()
    if dist.get_rank() == 1:
        child = os.fork()
        if not child:
            time.sleep(20)
            os._exit(0)
        del peers
        gc.collect()
        dist.barrier()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return ["", ""]
    said = []
    first = swap(peers, torch.zeros(4), torch.zeros(4))
    for work in (first, None):
        begin = time.monotonic()
        work = work or swap(peers, torch.zeros(4), torch.zeros(4))
        said.append(error_of(work.wait))
        assert time.monotonic() - begin < 10
    dist.barrier()
    return said


def test_a_peer_that_ends_fails_what_is_under_way_and_what_follows_at_once():
    first, second = run_ranks(2, a_peer_hangs_up)[0]
    assert first == "rank 1 of the group has ended or given up, during x"
    assert second == "the connections of this rank to the others of the group are closed; x needs them"


def a_peer_is_late():
    """Rank 1 starts after rank 0 has given up: what it gives is not read any more."""
    peers, theirs, said = peers_of(timeout=1.0), torch.zeros(4), ""
    if dist.get_rank() == 0:
        said = error_of(swap(peers, torch.ones(4), theirs).wait)
    dist.barrier()
    if dist.get_rank() == 1:
        error_of(swap(peers, torch.ones(4), theirs).wait)
    dist.barrier()
    return said, theirs.sum().item()


def test_a_peer_that_starts_too_late_is_named_and_not_read():
    (said, read), _ = run_ranks(2, a_peer_is_late)
    assert said == "rank(s) [1] of the group did not take part in x within 1 s"
    assert read == 0


def the_deadline_is_of_the_start():
    peers = peers_of(timeout=2.0)
    if dist.get_rank() == 0:
        work = swap(peers, torch.zeros(4), torch.zeros(4))
        time.sleep(2.5)
        begin = time.monotonic()
        error_of(work.wait)
        assert time.monotonic() - begin < 0.5
    dist.barrier()


def test_patience_counts_from_the_start_of_the_exchange():
    run_ranks(2, the_deadline_is_of_the_start)


def slow_reads(pause, progress=None):
    """From now on a read stops half-way for so many seconds."""
    usual = peer_memory.read_memory

    def slow(process, address, into, nbytes):
        half = nbytes // 2
        usual(process, address, into, half)
        time.sleep(pause)
        usual(process, address + half, into + half, nbytes - half)
        if progress is not None:
            progress.append("read")

    peer_memory.read_memory = slow
    return usual


def one_gives_up_while_it_is_read():
    """Rank 0 gives up and uses its memory for something else while rank 1 is still reading it."""
    peers = peers_of(timeout=1.0 if dist.get_rank() == 0 else 30.0)
    mine, theirs = torch.full((SIZE,), 5.0), torch.zeros(SIZE)
    usual = slow_reads(3.0 if dist.get_rank() == 1 else 0.0)
    work = swap(peers, mine, theirs)
    said = error_of(work.wait)
    mine.fill_(-1.0)
    assert work.quiet
    dist.barrier()
    peer_memory.read_memory = usual
    return said


def test_what_is_read_from_a_peer_that_has_given_up_is_an_error_not_a_value():
    first, second = run_ranks(2, one_gives_up_while_it_is_read)
    assert first == "rank(s) [1] of the group did not take part in x within 1 s"
    assert second == "rank 0 of the group has ended or given up, during x"


def the_deadline_passes_in_a_read():
    """Rank 0's time is up while its own thread writes its memory: it may not have the memory back before."""
    progress: list = []
    peers = peers_of(timeout=1.0 if dist.get_rank() == 0 else 30.0)
    usual = slow_reads(2.0 if dist.get_rank() == 0 else 0.0, progress)
    work = swap(peers, torch.ones(SIZE), torch.zeros(SIZE))
    with contextlib.suppress(RuntimeError):
        work.wait()
    assert progress == ["read"]
    dist.barrier()
    peer_memory.read_memory = usual


def test_wait_does_not_return_while_the_thread_still_writes():
    run_ranks(2, the_deadline_passes_in_a_read)


def one_is_frozen():
    """Rank 1 is stopped by a signal in the middle; rank 0 gives up, changes its memory and lets it go on."""
    peers = peers_of(timeout=2.0)
    mine, theirs = torch.full((SIZE,), float(dist.get_rank() + 1)), torch.zeros(SIZE)
    pids: list = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 0:
        os.kill(pids[1], signal.SIGSTOP)
        said = error_of(swap(peers, mine, theirs).wait)
        mine.fill_(-1.0)
        os.kill(pids[1], signal.SIGCONT)
    else:
        time.sleep(0.5)
        said = error_of(swap(peers, mine, theirs).wait)
    dist.barrier()
    return said


def test_a_frozen_peer_fails_both():
    first, second = run_ranks(2, one_is_frozen)
    assert first == "rank(s) [1] of the group did not take part in x within 2 s"
    assert "given up" in second or "closed" in second


class Interrupted(Exception):
    """What a signal handler raises."""


def interrupt_after(seconds):
    def handler(number, frame):
        raise Interrupted

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def a_wait_is_interrupted():
    """Rank 0's wait is interrupted by a signal before rank 1 has started."""
    layout = plan([TensorSpec("w", (1024, 1024))], 2)
    buffer = DBuffer(layout, mesh_of(), dtype=torch.float32, transport="peer_memory", name="unit")
    buffer.load_full({"w": torch.full((1024, 1024), 3.0)})
    buffer.all_gather().wait()  # connects
    buffer.zero_("full")
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(1.0)
        buffer.all_gather().wait()
    else:
        handle = buffer.all_gather()
        interrupt_after(0.2)
        with pytest.raises(Interrupted):
            handle.wait()
        assert buffer.busy
        assert not handle.waited
        with pytest.raises(RuntimeError, match="release while a collective is under way"):
            buffer.release()
        handle.wait()
    assert not buffer.busy
    return bool((buffer.views["w"] == 3).all())


def test_after_an_interrupted_wait_the_buffer_is_busy_and_the_next_wait_goes_on():
    assert run_ranks(2, a_wait_is_interrupted) == [True, True]


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


def the_thread_fails():
    """What came in is no message: the thread ends with an error."""
    peers, trouble = connect(dist.group.WORLD)  # type: ignore[arg-type]
    assert not trouble
    said = []
    if dist.get_rank() == 1:
        dist.barrier()
        peers[0].socket.send(b"abc")
    else:
        memory = PeerMemory(peers, 30.0)
        work = swap(memory, torch.zeros(4), torch.zeros(4))
        dist.barrier()
        said = [error_of(work.wait), error_of(lambda: memory.exchange("y", {}, {}).wait())]
    dist.barrier()
    for peer in peers.values():
        peer.socket.close()
    return said


def test_where_a_message_means_nothing_nobody_waits_for_the_thread():
    first, second = run_ranks(2, the_thread_fails, timeout=30)[0]
    assert first == "rank 1 of the group sent 3 bytes that mean nothing"
    assert second == "the connections of this rank to the others of the group are closed; y needs them"


def threads_after(times):
    for _ in range(times):
        peers = peers_of()
        theirs = torch.zeros(SIZE)
        swap(peers, torch.ones(SIZE), theirs).wait()
        assert bool(theirs.all())
        dist.barrier()
        del peers
    deadline = time.monotonic() + 10
    while any(t.name == "dbuffer peers" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [t.name for t in threading.enumerate() if t.name == "dbuffer peers"]


def test_the_thread_ends_with_the_connections():
    assert run_ranks(2, threads_after, 3) == [[], []]
