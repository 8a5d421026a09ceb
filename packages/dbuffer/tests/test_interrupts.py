"""A signal that comes in anywhere: the next wait goes on, brings the right value, or raises."""

import contextlib
import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import (
    SIZE,
    Interrupted,
    build_large,
    can_swap,
    error_of,
    load,
    peers_of,
    simulated_mesh,
    swap,
    zero,
)

import dbuffer
from dbuffer import DBuffer, Gather, Recycler, ReduceScatter, watch_order
from dbuffer._torch_compat import CAN_SWAP
from dbuffer.encodings import BlockFP8, BlockInt8, BlockReduction, BlocksOnWire, CastReduction
from layout_planner import Rows, TensorSpec, plan
from ragged_shard.testing import on_ranks, run_ranks

PACKAGE = os.path.dirname(dbuffer.__file__)
ARITHMETIC = tuple(f"{name}.py" for name in ("formats", "tiles", "launch", "noise"))
LAYOUT = plan([TensorSpec("w", (16, 4), Rows(4))], 2, align=16)


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


def build_small(mesh, **options):
    return DBuffer(
        LAYOUT, mesh, dtype=torch.float32, check_ranks=False, alias=False, recycler=Recycler("cpu"), **options
    )


def holds(tensors, value):
    """Whether all elements are that number, as well as codes can say it."""
    return all(torch.allclose(one, torch.full_like(one, value), rtol=1e-2, atol=0) for one in tensors)


def outcome(handle, tensors, value):
    """Wait again: `raised`, or `right`. Other values fail."""
    try:
        handle.wait()
    except RuntimeError:
        return "raised"
    assert holds(tensors(), value), "wrong values without an error"
    return "right"


def gathered(buffer):
    return list(buffer.views.values())


def start_gather(buffer, value):
    """A gather of `value`; the simulated group repeats this rank's shard."""
    buffer.shard[0].fill_(value)
    buffer.materialize()
    buffer.full[0].fill_(torch.nan)
    return Gather([buffer]).start()


def start_reduction(buffer, value, accumulate):
    """A reduction to `value`: two ranks give half of it each, or a quarter, added to a shard of half of it."""
    buffer.shard[0].fill_(value / 2 if accumulate else torch.nan)
    buffer.materialize()
    buffer.full[0].fill_(value / 4 if accumulate else value / 2)
    return ReduceScatter([buffer], op="sum").start(accumulate=accumulate)


def interrupt_each_wait(make, start, tensors):
    """Interrupt `wait` at each bytecode in turn, and here and there within the arithmetic of formats."""
    for found in (
        interrupt_waits(make, start, tensors, 1, ARITHMETIC),
        interrupt_waits(make, start, tensors, 29),
    ):
        assert min(found.values()) > 0


def interrupt_waits(make, start, tensors, step, without=()):
    """How often a second `wait` raised, and how often it brought the right values; the next collective must do so."""
    buffer, found = make(), {"raised": 0, "right": 0}

    def attack(number):
        nonlocal buffer
        value = 2.0 ** (number % 5)
        handle = start(buffer, value)
        try:
            with interrupted_at(number, without):
                handle.wait()
        except Interrupted:
            found[outcome(handle, lambda: tensors(buffer), value)] += 1
            assert buffer.in_flight is None
            try:
                after = start(buffer, 3 * value)
            except RuntimeError:
                assert not CAN_SWAP  # else memory that may still be written is replaced
                buffer = make()
            else:
                assert outcome(after, lambda: tensors(buffer), 3 * value) == "right", f"after {number}"
            return False
        assert holds(tensors(buffer), value)
        return True

    assert sweep(attack, step) > 50
    return found


def test_a_wait_for_quantized_weights_interrupted_at_any_bytecode():
    with simulated_mesh(2, "cpu") as mesh:
        interrupt_each_wait(
            lambda: build_small(mesh, wire=BlocksOnWire(BlockFP8((4, 4)))), start_gather, gathered
        )


@pytest.mark.parametrize(
    ("form", "accumulate"),
    [
        pytest.param(None, True, id="plain, added"),
        pytest.param(CastReduction(), True, id="a cast, added"),
        pytest.param(BlockReduction(BlockInt8(4)), False, id="codes", marks=pytest.mark.long),
    ],
)
def test_a_wait_for_gradients_interrupted_at_any_bytecode(form, accumulate):
    with simulated_mesh(2, "cpu") as mesh:
        interrupt_each_wait(
            lambda: build_small(mesh, reduction=form),
            lambda buffer, value: start_reduction(buffer, value, accumulate),
            lambda buffer: list(buffer.local_views.values()),
        )


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


def ring(seconds, error):
    """Have a signal's handler raise after so many seconds."""

    def handler(number, frame):
        signal.signal(
            signal.SIGALRM, signal.SIG_DFL
        )  # else the error's traceback keeps buffers in later tests
        raise error

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def a_wait_is_interrupted(error, kind, transport):
    """Rank 0's wait is interrupted by a signal before rank 1 has started; rank 1 still gets its shard."""
    buffer = build_large(transport=transport)
    load(buffer, {"w": torch.full((1024, 1024), 3.0)})
    world = dist.group.WORLD
    assert world is not None
    order = watch_order(world)
    # The first connects; then it is predicted, so that no start waits for rank 1.
    for each in (Gather, kind, kind):
        each([buffer]).start().wait()
        order.end_pass(buffer.layer)
    if kind is Gather:
        zero(buffer.full)
    dist.barrier()
    if dist.get_rank() == 1:
        dist.recv(torch.zeros(1), 0)
        kind([buffer]).start().wait()
    else:
        handle = kind([buffer]).start()
        ring(0.2, error)
        with pytest.raises(type(error), match=r"^from the handler$"):
            handle.wait()
        assert buffer.in_flight is not None
        assert not handle.completed
        with pytest.raises(RuntimeError, match="release while a collective is under way"):
            buffer.release()
        dist.send(torch.zeros(1), 1)
        handle.wait()
    assert buffer.in_flight is None
    return all(bool((flat == 3).all()) for flat in (buffer.full if kind is Gather else buffer.shard))


@pytest.mark.parametrize(
    "error", [Interrupted, RuntimeError]
)  # as torch's DataLoader raises where a worker dies
@pytest.mark.parametrize(
    ("kind", "transport"),
    [
        (Gather, "peer_memory"), (ReduceScatter, "peer_memory"),
        (Gather, "collectives"),  # gloo's reduce-scatters are not interrupted before they complete
    ],
)  # fmt: skip
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
            while not handle._work.is_completed():
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
        if dist.get_rank() == 0 and not handle.completed:
            load(buffer, {"w": torch.full((1024, 1024), 3.0)})
    return said


@can_swap  # else a buffer gets no other memory after an interrupt
@pytest.mark.parametrize("transport", ["peer_memory", pytest.param("collectives", marks=pytest.mark.long)])
def test_a_handlers_error_when_an_exchange_completes_is_not_taken_for_its_failure(transport):
    said = run_ranks(2, waits_for_completed_exchanges_are_interrupted, transport)
    assert said == [[], []]
