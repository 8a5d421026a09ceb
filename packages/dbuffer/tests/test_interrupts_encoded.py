"""A signal anywhere in the wait for encoded bytes: it and the next collective bring the right values, or raise."""

import pytest
import torch
from dbuffer_helpers import Interrupted, simulated_mesh
from test_interrupts import interrupted_at, sweep

from dbuffer import DBuffer, Gather, Recycler, ReduceScatter
from dbuffer._torch_compat import CAN_SWAP
from dbuffer.encodings import BlockFP8, BlockInt8, BlockReduction, BlocksOnWire, CastReduction
from layout_planner import Rows, TensorSpec, plan

ARITHMETIC = tuple(f"{name}.py" for name in ("formats", "tiles", "launch", "noise"))
LAYOUT = plan([TensorSpec("w", (16, 4), Rows(4))], 2, align=16)


def build(mesh, **options):
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
    """Of `value`; the simulated group repeats this rank's shard."""
    buffer.shard[0].fill_(value)
    buffer.materialize()
    buffer.full[0].fill_(torch.nan)
    return Gather([buffer]).start()


def start_reduction(buffer, value, accumulate):
    """Of `value`: two ranks give half of it, or a quarter to add to a shard of half of it."""
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
        interrupt_each_wait(lambda: build(mesh, wire=BlocksOnWire(BlockFP8((4, 4)))), start_gather, gathered)


@pytest.mark.parametrize(
    ("form", "accumulate"),
    [
        pytest.param(CastReduction(), True, id="a cast, added"),
        pytest.param(BlockReduction(BlockInt8(4)), False, id="codes", marks=pytest.mark.long),
    ],
)
def test_a_wait_for_encoded_gradients_interrupted_at_any_bytecode(form, accumulate):
    with simulated_mesh(2, "cpu") as mesh:
        interrupt_each_wait(
            lambda: build(mesh, reduction=form),
            lambda buffer, value: start_reduction(buffer, value, accumulate),
            lambda buffer: list(buffer.local_views.values()),
        )
