"""A signal that comes in anywhere: the next wait goes on, brings the right value, or raises."""

import contextlib
import os
import signal
import sys
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import SIZE, Interrupted, build_large, can_swap, error_of, load, peers_of, swap, zero

import dbuffer
from dbuffer import Gather, HandleState, ReduceScatter, _order, _patient_calls, watch_order
from dbuffer._torch_compat import CAN_SWAP
from dbuffer.transport.peer import peer_memory
from ragged_shard.testing import on_ranks, run_ranks

PACKAGE = os.path.dirname(dbuffer.__file__)


@contextlib.contextmanager
def interrupted_at(number, without=(), error=Interrupted):
    """Raise at so many bytecodes of this package from here on, in this thread; yields what was counted.

    Args:
        without: names of files whose bytecodes do not count.
        error: what is raised.
    """
    counted = [0]

    def trace(frame, event, _):
        path = frame.f_code.co_filename
        if not path.startswith(PACKAGE) or path.endswith(without):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            counted[0] += 1
            if counted[0] == number:
                sys.settrace(None)
                raise error
        return trace

    sys.settrace(trace)
    try:
        yield counted
    finally:
        sys.settrace(None)


def sweep(attack, step=1):
    """`attack(number)` with an interrupt at each bytecode in turn, or each `step`th, until it comes to none."""
    for number in range(1, 5000, step):
        if attack(number):
            return number
    raise AssertionError("there was always another bytecode")


def again(buffer):
    """The buffer after an interrupt; on torch 2.11 another one, since the memory of that one may be out of use."""
    return buffer if CAN_SWAP else build_large(alias=False, rows=4)


def fill(buffer):
    """Ones in the shard, twos in the gathered memory."""
    buffer.shard[0].fill_(1.0)
    buffer.materialize()
    buffer.full[0].fill_(2.0)


@on_ranks(1)
def test_a_wait_interrupted_at_any_bytecode_writes_its_result_once_or_raises():
    buffer = build_large(alias=False, rows=4)

    def attack(number):
        nonlocal buffer
        fill(buffer)
        handle = ReduceScatter([buffer], op="sum").start(accumulate=True)
        try:
            with interrupted_at(number):
                handle.wait()
        except Interrupted:
            with contextlib.suppress(RuntimeError):
                handle.wait()
                assert bool((buffer.shard[0] == 3).all()), f"at {number}"  # added once
            assert buffer.in_flight is None
            with contextlib.suppress(RuntimeError):
                handle.wait()
            buffer = again(buffer)
            return False
        return True

    assert sweep(attack) > 50


@on_ranks(1)
def test_a_start_interrupted_at_any_bytecode_never_passes_for_a_gather():
    buffer = build_large(alias=False, rows=4)

    def attack(number):
        nonlocal buffer
        fill(buffer)
        try:
            with interrupted_at(number):
                Gather([buffer]).start()
        except Interrupted:
            if buffer.in_flight is not None:
                with contextlib.suppress(RuntimeError):
                    buffer.wait()
                    assert bool((buffer.full[0] == 1).all()), f"at {number}"
            assert buffer.in_flight is None, f"at {number}"
            buffer = again(buffer)
            return False
        buffer.wait()
        return True

    assert sweep(attack) > 50


class Ringing:
    """A bell at which a signal comes in just after it has rung."""

    def __init__(self, bell):
        self.bell = bell

    def send(self, data):
        self.bell.send(data)
        time.sleep(0.2)  # the thread begins meanwhile
        raise Interrupted


@on_ranks(2)
def test_a_start_interrupted_after_it_has_begun_is_seen_by_the_peers():
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
    said = error_of(swap(peers, mine, [theirs]).wait)
    assert "has ended or given up" in said or "are closed" in said


@on_ranks(2)
def test_a_start_interrupted_before_it_begins_can_be_made_again():
    peers = peers_of()
    mine, theirs = torch.full((SIZE,), float(dist.get_rank())), torch.zeros(SIZE)
    if dist.get_rank() == 0:
        with mock.patch.object(peer_memory, "_digest", side_effect=Interrupted), pytest.raises(Interrupted):
            swap(peers, mine, [theirs])
    swap(peers, mine, [theirs]).wait()
    assert theirs[0] == 1 - dist.get_rank()


def ring(seconds, error):
    """Have a signal's handler raise after so many seconds."""

    def handler(number, frame):
        raise error

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def a_wait_is_interrupted(error, kind=Gather, transport="auto"):
    """Rank 0's wait is interrupted by a signal before rank 1 has started; rank 1 still gets its shard."""
    buffer = build_large(transport=transport)
    watch_order(buffer.mesh_view.group)
    load(buffer, {"w": torch.full((1024, 1024), 3.0)})
    Gather([buffer]).start().wait()  # connects
    if kind is Gather:
        zero(buffer.full)
    dist.barrier()
    if dist.get_rank() == 1:
        dist.recv(torch.zeros(1), 0)
        kind([buffer]).start().wait()
    else:
        with mock.patch.object(_order, "_MEETING", 0.0):  # rank 1 has not started
            handle = kind([buffer]).start()
        ring(0.2, error)
        with (
            pytest.raises(type(error), match=r"^from the handler$"),
            mock.patch.object(_patient_calls, "_DOUBT", 1.0),
        ):
            handle.wait()
        assert buffer.in_flight is not None
        assert handle.state is HandleState.STARTED
        with pytest.raises(RuntimeError, match="release while a collective is under way"):
            buffer.release()
        dist.send(torch.zeros(1), 1)
        handle.wait()
    assert buffer.in_flight is None
    return all(bool((flat == 3).all()) for flat in (buffer.full if kind is Gather else buffer.shard))


@pytest.mark.parametrize(
    "error", [Interrupted, RuntimeError]
)  # as torch's DataLoader raises where a worker dies
@pytest.mark.parametrize("kind", [Gather, ReduceScatter])
@pytest.mark.parametrize("transport", ["auto", "collectives"])
def test_after_a_handlers_error_in_a_wait_the_next_wait_goes_on(error, kind, transport):
    assert all(run_ranks(2, a_wait_is_interrupted, error("from the handler"), kind, transport))


def waits_for_completed_exchanges_are_interrupted(transport):
    """Rank 0's wait, when the exchange has completed: by a handler's RuntimeError at each bytecode in turn."""
    buffer = build_large(transport=transport)
    load(buffer, {"w": torch.full((1024, 1024), 3.0)})
    said = []
    for number in range(1, 250):
        buffer.materialize()
        zero(buffer.full)
        handle = Gather([buffer]).start()
        if dist.get_rank() == 0:
            while not handle.completed:
                time.sleep(1e-4)
            from_handler = RuntimeError("from the handler")
            try:
                with interrupted_at(number, error=from_handler):
                    handle.wait()
            except RuntimeError as error:
                if error is not from_handler:
                    said.append(f"at {number}: {error}")
        try:
            handle.wait()
            assert bool((buffer.views["w"] == 3).all()), f"at {number}"
        except RuntimeError as error:
            if "interrupted while" not in str(error):
                said.append(f"at {number}, then: {error}")
        assert buffer.in_flight is None, f"at {number}"
        if dist.get_rank() == 0 and handle.state is not HandleState.COMPLETED:
            load(buffer, {"w": torch.full((1024, 1024), 3.0)})
    return said


@can_swap  # else a buffer gets no other memory after an interrupt
@pytest.mark.parametrize("transport", ["peer_memory", pytest.param("collectives", marks=pytest.mark.long)])
def test_a_handlers_error_when_an_exchange_completes_is_not_taken_for_its_failure(transport):
    said = run_ranks(2, waits_for_completed_exchanges_are_interrupted, transport)
    assert said == [[], []]
