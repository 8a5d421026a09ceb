"""Ranks that make different calls: all of them raise, and groups of the same ranks do not meet."""

import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import build_large, error_of, load, zero
from torch.distributed.device_mesh import DeviceMesh

import dbuffer
from dbuffer import DBuffer, Gather, HandleState, ReduceScatter, _order, _patient_calls, watch_order
from layout_planner import TensorSpec, plan
from ragged_shard.testing import on_ranks


@pytest.mark.parametrize("what", ["reduces", "averages", "names another", "gathers more", "gathers two"])
@on_ranks(2)
def test_ranks_that_exchange_different_things_all_raise(what):
    """Rank 1 calls for something else."""
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=20))
    mesh, layout = DeviceMesh.from_group(group, "cpu"), plan([TensorSpec("w", (1024, 1024))], 2)
    options: Any = {"dtype": torch.float32, "check_ranks": False, "transport": "peer_memory"}
    first, second = (DBuffer(layout, mesh, name=name, **options) for name in ("first", "second"))
    larger = DBuffer(plan([TensorSpec("w", (2048, 1024))], 2), mesh, name="first", **options)
    for buffer in (first, second, larger):
        buffer.materialize()
    other = {
        "reduces": ReduceScatter([first]).start,
        "averages": lambda: ReduceScatter([first], op="sum").start(),
        "names another": Gather([second]).start,
        "gathers more": Gather([larger]).start,
        "gathers two": lambda: dbuffer.Gather([first, second]).start(),
    }[what]
    usual = Gather([first]).start if what != "averages" else ReduceScatter([first]).start
    message = error_of((usual, other)[rank]().wait)
    assert f"rank {1 - rank} of the group takes part in" in message
    assert "all ranks must make the same calls in the same order" in message


@on_ranks(2)
def test_two_groups_of_the_same_ranks_do_not_meet():
    """Groups of the same ranks, used in another order on each rank."""
    buffers = [build_large(name, dist.new_group()) for name in "ab"]
    for value, buffer in enumerate(buffers):
        load(buffer, {"w": torch.full((1024, 1024), float(value))})
        Gather([buffer]).start().wait()  # connects
        zero(buffer.full)
    order = buffers if dist.get_rank() == 0 else buffers[::-1]
    handles = [Gather([buffer]).start() for buffer in order]
    for handle in handles:
        handle.wait()
    assert [buffer.full[0].unique().tolist() for buffer in buffers] == [[0.0], [1.0]]


@pytest.mark.parametrize(
    ("size", "what", "transport"),
    [
        *((3, what, "peer_memory") for what in ("count", "order", "dtype")),
        pytest.param(8, "order", "auto", marks=pytest.mark.long),
    ],
)
@on_ranks("size")
def test_where_one_of_several_ranks_disagrees_all_raise(size, what, transport):
    """The last rank leaves a call out, makes two in the other order, or has another dtype of the same size."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    a, b = (build_large(name, group, transport) for name in "ab")
    odd = build_large("a", group, transport, dtype=torch.int32)
    for value, buffer in enumerate((a, b)):
        load(buffer, {"w": torch.full((1024, 1024), float(value))})
    mine = [a, b]
    if dist.get_rank() == size - 1:
        mine = {"count": [b], "order": [b, a], "dtype": [odd, b]}[what]
    raised = False
    handles = []
    for buffer in mine:
        try:
            handles.append((buffer, Gather([buffer]).start()))
        except RuntimeError:
            raised = True
    for buffer, handle in handles:
        try:
            handle.wait()
        except RuntimeError:
            raised = True
        else:
            assert buffer.views["w"].unique().tolist() == [0.0 if buffer is a else 1.0]
    dist.barrier()
    assert raised


@pytest.mark.parametrize("kind", [Gather, ReduceScatter])
@pytest.mark.parametrize("what", ["order", "size"])
@on_ranks(3)
def test_ranks_that_start_different_collectives_of_torch_all_raise_and_live(kind, what):
    """With torch's collectives: buffers of another size, or the same ones in another order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    watch_order(mesh.get_group())
    rows = {"order": (16, 16), "size": (16, 32)}[what]
    buffers = [
        DBuffer(
            plan([TensorSpec("w", (size * count, 4))], size), mesh, name=name, transport="collectives",
            dtype=torch.float32,
        )
        for name, count in zip("ab", rows, strict=True)
    ]  # fmt: skip
    for buffer in buffers:
        buffer.materialize()
    with mock.patch.object(_patient_calls, "_DOUBT", 0.2), mock.patch.object(_order, "_ASKING", 0.2):
        for _ in range(2):
            kind([buffers[0]]).start().wait()
            watch_order(mesh.get_group()).compare(buffers[0].layer)
        message = error_of(lambda: kind([buffers[rank == size - 1]]).start().wait())
    assert "the ranks do not agree on the order of collectives" in message


@pytest.mark.parametrize("kind", [Gather, pytest.param(ReduceScatter, marks=pytest.mark.long)])
@on_ranks(3)
def test_a_timeout_of_several_buffers_is_the_collectives_failure_and_names_it(kind):
    """With torch's collectives, of two buffers in one call that rank 0 never starts."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=1)), "cpu")
    watch_order(mesh.get_group())
    layout = plan([TensorSpec("w", (16, 4))], dist.get_world_size())
    options: Any = {"transport": "collectives", "dtype": torch.float32}
    buffers = [DBuffer(layout, mesh, name=name, **options) for name in "ab"]
    for buffer in buffers:
        buffer.materialize()
    if dist.get_rank() == 0:
        time.sleep(3.0)
        return
    with mock.patch.object(_order, "_MEETING", 0.0):
        handle = kind(buffers).start()
    assert " of a, b failed: " in error_of(handle.wait)
    assert handle.state is HandleState.FAILED
