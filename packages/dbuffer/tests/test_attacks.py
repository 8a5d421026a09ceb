"""Interrupts, forks, kills, late writers and ranks that disagree: an error or the right value, never anything else."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import mesh_of
from torch.distributed.device_mesh import DeviceMesh

import dbuffer
from dbuffer import DBuffer, DebugRecycler, Recycler
from dbuffer._torch_compat import CAN_SWAP
from dbuffer.transport import peer_memory, transport_of
from dbuffer.transport.digest import digest
from dbuffer.transport.handshake import connect
from dbuffer.transport.peer_memory import PeerMemory
from dbuffer.transport.sends import Sends, _tag
from layout_planner import TensorSpec, plan
from ragged_shard.testing import RankError, run_ranks

SIZE = 1 << 16
PACKAGE = os.path.dirname(dbuffer.__file__)
BOTH = pytest.mark.parametrize("transport", ["sends", "peer_memory"])
can_swap = pytest.mark.skipif(not CAN_SWAP, reason="this torch cannot exchange memory between storages")


class Interrupted(Exception):
    """What a signal handler raises."""


def error_of(call):
    """What it says when it fails, as it must."""
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value)


def peers_of(timeout=30.0):
    world: Any = dist.group.WORLD
    peers, trouble = connect(world)
    assert not trouble, trouble
    return PeerMemory(peers, timeout)


def swap(mover, gives, takes, label="x"):
    """Start an exchange with all other ranks; `takes` is one tensor for each."""
    others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    return mover.exchange(
        label, {r: [gives] for r in others}, {r: [t] for r, t in zip(others, takes, strict=True)}
    )


def build(name="unit", group=None, transport="peer_memory", rows=1024, **options):
    """A buffer whose exchanges are large enough to go directly, and what the world says of it."""
    mesh = DeviceMesh.from_group(group, "cpu") if group else mesh_of()
    layout = plan([TensorSpec("w", (rows, 1024))], mesh.size())
    given: Any = {"dtype": torch.float32, "check_ranks": False} | options
    return DBuffer(layout, mesh, name=name, transport=transport, **given)


# -- interrupts at every bytecode --------------------------------------------------------------------------------------


@contextlib.contextmanager
def interrupted_at(number):
    """Raise at so many bytecodes of this package from here on, in this thread; yields what was counted."""
    counted = [0]

    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            counted[0] += 1
            if counted[0] == number:
                sys.settrace(None)
                raise Interrupted
        return trace

    sys.settrace(trace)
    try:
        yield counted
    finally:
        sys.settrace(None)


def sweep(attack):
    """`attack(number)` with an interrupt at each bytecode in turn, until it comes to none."""
    for number in range(1, 5000):
        if attack(number):
            return number
    raise AssertionError("there was always another bytecode")


def waits_are_interrupted():
    buffer = build(alias=False, rows=4)

    def attack(number):
        buffer.shard[0].fill_(1.0)
        buffer.materialize()
        buffer.full[0].fill_(2.0)
        handle = buffer.reduce_scatter(op="sum", accumulate=True)
        try:
            with interrupted_at(number):
                handle.wait()
        except Interrupted:
            with contextlib.suppress(RuntimeError):
                handle.wait()
                assert bool((buffer.shard[0] == 3).all()), f"at {number}"  # added once
            assert not buffer.busy
            with contextlib.suppress(RuntimeError):
                handle.wait()
            return False
        return True

    assert sweep(attack) > 50


def test_a_wait_interrupted_at_any_bytecode_writes_its_result_once_or_raises():
    run_ranks(1, waits_are_interrupted)


def starts_are_interrupted():
    buffer = build(alias=False, rows=4)
    buffer.shard[0].fill_(1.0)

    def attack(number):
        buffer.materialize()
        buffer.full[0].fill_(2.0)
        try:
            with interrupted_at(number):
                buffer.all_gather()
        except Interrupted:
            if buffer.busy:
                with contextlib.suppress(RuntimeError):
                    buffer.wait()
                    assert bool((buffer.full[0] == 1).all()), f"at {number}"
            assert not buffer.busy, f"at {number}"
            return False
        buffer.wait()
        return True

    assert sweep(attack) > 50


def test_a_start_interrupted_at_any_bytecode_never_passes_for_a_gather():
    run_ranks(1, starts_are_interrupted)


class Ringing:
    """A bell at which a signal comes in just after it has rung."""

    def __init__(self, bell):
        self.bell = bell

    def send(self, data):
        self.bell.send(data)
        time.sleep(0.2)  # the thread begins meanwhile
        raise Interrupted


def a_start_is_interrupted_when_it_has_begun():
    """Rank 0 will never wait for what it started, and uses its memory for something else."""
    peers = peers_of()
    mine, theirs = torch.full((SIZE,), 5.0), torch.zeros(SIZE)
    if dist.get_rank() == 0:
        bell, peers._answering.bell = peers._answering.bell, Ringing(peers._answering.bell)
        with pytest.raises(Interrupted):
            swap(peers, mine, [theirs])
        peers._answering.bell = bell
        mine.fill_(-1.0)
        dist.barrier()
    else:
        dist.barrier()
    return error_of(swap(peers, mine, [theirs]).wait)


def test_a_start_interrupted_after_it_has_begun_is_seen_by_the_peers():
    for said in run_ranks(2, a_start_is_interrupted_when_it_has_begun):
        assert "has ended or given up" in said or "are closed" in said


def a_start_is_interrupted_before_it_begins():
    peers = peers_of()
    mine, theirs = torch.full((SIZE,), float(dist.get_rank())), torch.zeros(SIZE)
    usual = peer_memory.digest

    def raising(*_):
        raise Interrupted

    if dist.get_rank() == 0:
        peer_memory.digest = raising
        with pytest.raises(Interrupted):
            swap(peers, mine, [theirs])
        peer_memory.digest = usual
    swap(peers, mine, [theirs]).wait()
    return theirs[0].item()


def test_a_start_interrupted_before_it_begins_can_be_made_again():
    assert run_ranks(2, a_start_is_interrupted_before_it_begins) == [1.0, 0.0]


def a_handler_raises_runtime_error(transport):
    """As torch's DataLoader does where a worker dies. Rank 1 takes part later, and must get rank 0's shard."""
    buffer = build(transport=transport)
    buffer.load_full({"w": torch.full((1024, 1024), 3.0)})
    buffer.all_gather().wait()  # connects
    buffer.zero_("full")
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.6)
        buffer.all_gather().wait()
    else:

        def handler(*_):
            raise RuntimeError("DataLoader worker is killed")

        handle = buffer.all_gather()
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        assert error_of(handle.wait) == "DataLoader worker is killed"
        assert buffer.busy
        handle.wait()
    return bool((buffer.views["w"] == 3).all())


@BOTH
def test_a_signal_handlers_runtime_error_is_not_taken_for_the_collectives(transport):
    assert run_ranks(2, a_handler_raises_runtime_error, transport) == [True, True]


def interrupt_at_failure(frame, event, _):
    """Raise where torch's own wait raises: a signal that comes at the moment of the peer's failure."""
    if frame.f_code.co_name not in ("wait", "_wait_for"):
        return None
    if event == "exception" and frame.f_code.co_name == "_wait_for":
        sys.settrace(None)
        raise Interrupted
    return interrupt_at_failure


def a_failure_is_interrupted():
    """Rank 1 agrees to the exchange and takes rank 0's tensor, but never sends its own."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    mine, theirs = torch.ones(4), torch.zeros(4)
    if dist.get_rank() == 1:
        agreed = digest("1 x", [mine])
        said = torch.tensor(list(agreed), dtype=torch.uint8)
        dist.recv(theirs, group=group, group_src=0, tag=_tag(agreed, 0))
        dist.recv(torch.zeros_like(said), group=group, group_src=0, tag=1)
        dist.send(said, group=group, group_dst=0, tag=1)
        dist.barrier()
        return []
    work = swap(Sends(group), mine, [theirs])
    sys.settrace(interrupt_at_failure)
    try:
        with pytest.raises(Interrupted):
            work.wait()
    finally:
        sys.settrace(None)
    assert work.under_way
    said = [error_of(work.wait), error_of(work.wait)]
    assert not work.under_way
    dist.barrier()
    return said


def test_a_failure_that_a_signal_hides_is_raised_by_the_next_wait():
    first, second = run_ranks(2, a_failure_is_interrupted)[0]
    assert first == second == "a send or receive failed while x was interrupted"


# -- giving up ---------------------------------------------------------------------------------------------------------


def the_thread_is_stuck():
    """Rank 0's thread is in a long read when its patience ends; rank 1 reads what rank 0 gave after that."""
    peers = peers_of(timeout=0.3 if dist.get_rank() == 0 else 30.0)
    usual, grace = peer_memory.read_memory, peer_memory.GRACE
    peer_memory.GRACE = 0.3

    def slow(*arguments):
        time.sleep(2.0 if dist.get_rank() == 0 else 1.2)
        usual(*arguments)

    peer_memory.read_memory = slow
    mine, theirs = torch.full((SIZE,), 5.0), torch.zeros(SIZE)
    dist.barrier()
    work = swap(peers, mine, [theirs])
    said = error_of(work.wait)
    quiet = work.quiet
    mine.fill_(-1.0)
    dist.barrier()
    peer_memory.read_memory, peer_memory.GRACE = usual, grace
    return said, quiet


def test_a_rank_whose_thread_is_stuck_hangs_up_before_its_wait_raises():
    (first, first_quiet), (second, _) = run_ranks(2, the_thread_is_stuck)
    assert first.startswith("the thread that exchanges memory has not answered for 0.3 s after the timeout")
    assert not first_quiet
    assert second == "rank 0 of the group has ended or given up, during x"


def a_peer_is_stopped_for_a_while():
    peers = peers_of()
    pids: Any = [None, None]
    dist.all_gather_object(pids, os.getpid())
    mine, theirs = torch.full((SIZE,), float(dist.get_rank())), torch.zeros(SIZE)
    if dist.get_rank() == 0:
        time.sleep(0.1)
        os.kill(pids[1], signal.SIGSTOP)
        work = swap(peers, mine, [theirs])
        time.sleep(0.3)
        os.kill(pids[1], signal.SIGCONT)
    else:
        work = swap(peers, mine, [theirs])
    work.wait()
    return theirs.unique().tolist()


def test_a_peer_that_is_stopped_for_a_while_costs_only_time():
    assert run_ranks(2, a_peer_is_stopped_for_a_while) == [[1.0], [0.0]]


def one_is_killed(when):
    """Rank 2 is killed in a read of its own, or while rank 0 reads from it; raises what `wait` says."""
    peers = peers_of()
    pids: Any = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    usual, rank = peer_memory.read_memory, dist.get_rank()

    def deadly(process, *arguments):
        if rank == 2 and when == "it reads":
            os.kill(os.getpid(), signal.SIGKILL)
        usual(process, *arguments)
        if rank == 0 and when == "it is read" and process == pids[2]:
            os.kill(process, signal.SIGKILL)
            time.sleep(0.2)

    peer_memory.read_memory = deadly
    swap(peers, torch.ones(SIZE), [torch.zeros(SIZE), torch.zeros(SIZE)]).wait()
    if rank == 2:
        time.sleep(10)  # it may have all it needs before it is killed


@pytest.mark.parametrize("when", ["it reads", "it is read"])
def test_where_a_rank_is_killed_the_others_raise_at_once(when):
    with pytest.raises(RankError) as caught:
        run_ranks(3, one_is_killed, when, timeout=20)
    assert "rank 2 ---\nthe process died (signal 9)" in str(caught.value)
    assert 0 in caught.value.causes
    for cause in caught.value.causes.values():
        assert "of the group" in str(cause)  # rank 2, or the one that has seen it first and given up
        assert "ended or given up, during x" in str(cause) or "during x: [Errno" in str(cause)


# -- forks and ends ----------------------------------------------------------------------------------------------------


def a_child_ends_normally():
    """A forked child uses what it inherited, then runs its finalizers, in the middle of an exchange of its parent."""
    peers = peers_of()
    mine, theirs = torch.full((SIZE,), float(dist.get_rank())), torch.zeros(SIZE)
    if dist.get_rank() == 0:
        work = swap(peers, mine, [theirs])
        ours, childs = os.pipe()
        child = os.fork()
        if not child:
            both = [error_of(work.wait), error_of(lambda: swap(peers, mine, [theirs]).wait())]
            os.write(childs, "\n".join(both).encode())
            del work, peers
            gc.collect()
            os._exit(0)
        os.close(childs)
        begin = time.monotonic()
        with os.fdopen(ours) as pipe:
            said = pipe.read()
        os.waitpid(child, 0)
        assert time.monotonic() - begin < 10
        dist.barrier()
    else:
        dist.barrier()
        work, said = swap(peers, mine, [theirs]), ""
    work.wait()
    dist.barrier()
    return theirs.unique().tolist(), said


def test_a_forked_child_fails_at_once_and_leaves_its_parents_connections_alone():
    (first, said), (second, _) = run_ranks(2, a_child_ends_normally, timeout=30)
    assert first == [1.0]
    assert second == [0.0]
    assert said.splitlines() == [
        "its connections belong to the process that forked this one",
        "the connections of this rank to the others of the group are closed; x needs them",
    ]


def a_buffer_is_dropped(transport):
    """Rank 0 drops buffer and handle under way, and its memory goes to whoever asks."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    buffer = build(group=group, transport=transport)
    buffer.load_full({"w": torch.full((1024, 1024), 3.0)})
    buffer.all_gather().wait()
    buffer.zero_("full")
    dist.barrier()
    if dist.get_rank() == 0:
        buffer.all_gather()
        del buffer
        gc.collect()
        others = [torch.full((n, 1024), -1.0) for n in (512, 512, 1024, 1024)]
        dist.barrier()
        dist.barrier()
        return bool(all((other == -1).all() for other in others))
    dist.barrier()
    try:
        buffer.all_gather().wait()
        return bool((buffer.views["w"] == 3).all())
    except RuntimeError:
        return True
    finally:
        dist.barrier()


@BOTH
def test_a_buffer_dropped_under_way_neither_gives_nor_takes_wrong_bytes(transport):
    assert run_ranks(2, a_buffer_is_dropped, transport) == [True, True]


def a_group_is_destroyed(transport):
    group = dist.new_group(timeout=timedelta(seconds=2))
    full, mine = torch.zeros(2 << 18), torch.full((1 << 18,), float(dist.get_rank()))
    moving = transport_of(group, transport)
    moving.all_gather([(full, mine)], "x").wait()
    full.fill_(7.0)
    dist.barrier()
    begin, said = time.monotonic(), ""
    if dist.get_rank() == 0:
        work = moving.all_gather([(full, mine)], "x")
        dist.destroy_process_group(group)
        del moving, group
        gc.collect()
        said = error_of(work.wait)
        mine.fill_(-1.0)
        dist.barrier()
    else:
        dist.barrier()
        said = error_of(lambda: moving.all_gather([(full, mine)], "x").wait())
    assert time.monotonic() - begin < 10
    dist.barrier()
    return said


@BOTH
def test_where_a_group_is_destroyed_under_way_both_sides_raise(transport):
    for said in run_ranks(2, a_group_is_destroyed, transport):
        assert said


def a_group_is_gone():
    """Torch takes None for the group of all ranks."""
    moving: Any = transport_of(dist.new_group(), "collectives")
    sends = Sends(dist.new_group())
    dist.destroy_process_group(moving._group())
    dist.destroy_process_group(sends._group())
    gc.collect()
    full, mine = torch.zeros(4), torch.zeros(2)
    return [
        error_of(lambda: moving.all_gather([(full, mine)], "x")),
        error_of(lambda: swap(sends, mine, [mine])),
    ]


def test_a_transport_whose_group_is_gone_does_not_use_another():
    assert run_ranks(2, a_group_is_gone) == [["the process group of this transport is gone"] * 2] * 2


ENDING = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from dbuffer.transport import transport_of
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2,
                        timeout=timedelta(seconds=20))
full, mine = torch.zeros(2 << 18), torch.full((1 << 18,), float(rank + 1))
moving = transport_of(dist.group.WORLD, "peer_memory")
moving.all_gather([(full, mine)], "x").wait()
full.zero_()
if rank == 0:
    work = moving.all_gather([(full, mine)], "x")
    sys.exit()
time.sleep(1.0)
try:
    moving.all_gather([(full, mine)], "x").wait()
    print(full.unique().tolist())
except RuntimeError as error:
    print(error)
sys.stdout.flush()
os._exit(0)
"""


def test_an_interpreter_that_exits_under_way_ends_and_its_peer_raises(tmp_path):
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", ENDING]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60)[0].strip() for rank in ranks]
    assert ranks[0].returncode == 0, said
    assert said[1].startswith(
        (
            "rank 0 of the group has ended or given up, during all_gather of x",
            "rank 0 of the group, during all_gather of x: [Errno 3]",  # its memory ends before its sockets do
            "the connections of this rank to the others of the group are closed; all_gather of x needs them",
        )
    )


# -- ranks that disagree -----------------------------------------------------------------------------------------------


def two_groups(transport):
    """Groups of the same ranks, used in another order on each rank."""
    buffers = [build(name, dist.new_group(), transport) for name in "ab"]
    for value, buffer in enumerate(buffers):
        buffer.load_full({"w": torch.full((1024, 1024), float(value))})
        buffer.all_gather().wait()  # connects
        buffer.zero_("full")
    order = buffers if dist.get_rank() == 0 else buffers[::-1]
    handles = [buffer.all_gather() for buffer in order]
    for handle in handles:
        handle.wait()
    return [buffer.full[0].unique().tolist() for buffer in buffers]


@BOTH
def test_two_groups_of_the_same_ranks_do_not_meet(transport):
    assert run_ranks(2, two_groups, transport) == [[[0.0], [1.0]]] * 2


def three_disagree(what, transport):
    """Rank 2 leaves a call out, makes two in the other order, or has another dtype of the same size."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    a, b = (build(name, group, transport) for name in "ab")
    odd = build("a", group, transport, dtype=torch.int32)
    for value, buffer in enumerate((a, b)):
        buffer.load_full({"w": torch.full((1024, 1024), float(value))})
    mine = [a, b]
    if dist.get_rank() == 2:
        mine = {"count": [b], "order": [b, a], "dtype": [odd, b]}[what]
    begin, raised = time.monotonic(), False
    handles = []
    for buffer in mine:
        try:
            handles.append((buffer, buffer.all_gather()))
        except RuntimeError:
            raised = True
    for buffer, handle in handles:
        try:
            handle.wait()
        except RuntimeError:
            raised = True
        else:
            assert buffer.views["w"].unique().tolist() == [0.0 if buffer is a else 1.0]
    assert time.monotonic() - begin < 12
    dist.barrier()
    return raised


class Slow:
    """A bell that rings when the thread, which heard of the exchange from a peer, has failed it and ended."""

    def __init__(self, bell):
        self.bell = bell

    def send(self, data):
        time.sleep(1.0)
        self.bell.send(data)


def a_start_fails_before_it_rings():
    peers = peers_of()
    if dist.get_rank() == 0:
        peers._answering.bell = Slow(peers._answering.bell)
    return error_of(swap(peers, torch.zeros(4 + dist.get_rank()), [torch.zeros(4)]).wait)


def test_an_exchange_that_fails_while_it_starts_keeps_its_reason():
    assert "all ranks must make the same calls" in run_ranks(2, a_start_fails_before_it_rings)[0]


@BOTH
@pytest.mark.parametrize("what", ["count", "order", "dtype"])
def test_where_one_of_three_ranks_disagrees_all_raise(what, transport):
    assert run_ranks(3, three_disagree, what, transport) == [True] * 3


# -- late writers ------------------------------------------------------------------------------------------------------


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
        peer_memory.read_memory(os.getpid(), torch.full((4,), 9.0).data_ptr(), self.address, 16)


def a_late_writer_after_a_failure():
    """Its memory is out of use as soon as `wait` has raised, not only once it is released."""
    late = Late("a peer died")
    buffer = build(transport=lambda _: late, recycler=Recycler("cpu"))
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
    buffer = build(transport=lambda _: late, recycler=recycler)
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
