"""Ranks that make different calls: all of them raise, and groups of the same ranks do not meet."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import build_large, error_of, load, zero
from torch.distributed.device_mesh import DeviceMesh

import dbuffer
from dbuffer import DBuffer, Gather, ReduceScatter
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
