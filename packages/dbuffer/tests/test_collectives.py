"""Values after gathers and reductions on real ranks equal a reference computed from full tensors; wrong use raises."""

import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import (
    LAYOUTS,
    assert_locals_equal,
    assert_views_equal,
    fill_views,
    full_tensors,
    load,
    make,
    mesh_of,
)
from torch.distributed.device_mesh import DeviceMesh

import dbuffer
from dbuffer import AllReduce, Gather, ReduceScatter
from ragged_shard.testing import on_ranks, record_collectives, run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PAIRS = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.float16),
         (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)]  # fmt: skip


def gather(layout, dtype, full_dtype):
    buffer = make(layout, dtype=dtype, full_dtype=full_dtype)
    tensors = full_tensors()
    load(buffer, tensors)
    for _ in range(2):
        Gather([buffer]).start().wait()
        assert_views_equal(buffer, tensors)
        assert all(view.dtype == full_dtype for view in buffer.views.values())
        buffer.release()
    assert_locals_equal(buffer, tensors)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gather_gives_every_rank_the_full_tensors(world_size, layout):
    for dtype, full_dtype in PAIRS:
        run_ranks(world_size, gather, layout, dtype, full_dtype)


def gradients(rank, world_size):
    """This rank's, and the sum over ranks."""
    each = [full_tensors(seed=r + 1) for r in range(world_size)]
    return each[rank], {name: sum(one[name] for one in each) for name in each[0]}


def reduce(layout, dtype, full_dtype, op, divide):
    buffer = make(layout, dtype=dtype, full_dtype=full_dtype)
    mine, total = gradients(dist.get_rank(), dist.get_world_size())
    fill_views(buffer, mine)
    ReduceScatter([buffer], op=op, divide=divide).start().wait()
    by = dist.get_world_size() if op == "avg" else divide or 1
    for name, view in buffer.local_views.items():
        want = (total[name] / by).reshape(-1)
        start, stop = buffer.layout.local_range(name, dist.get_rank())
        exact = by in (1, 2, 4)
        torch.testing.assert_close(
            view.reshape(-1).float().cpu(),
            want[start:stop],
            rtol=0 if exact else 2e-2,
            atol=0 if exact else 2e-2,
        )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reduce_scatter_gives_every_rank_its_part_of_the_sum(world_size, layout):
    for dtype, full_dtype in PAIRS:
        for op, divide in (("sum", None), ("avg", None), ("sum", 4.0)):
            run_ranks(world_size, reduce, layout, dtype, full_dtype, op, divide)
    run_ranks(world_size, reduce, layout, torch.int32, torch.int32, "sum", None)


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks("world_size")
def test_division_is_done_in_the_shards_dtype_not_in_the_narrow_one(world_size):
    buffer = make(dtype=torch.float32, full_dtype=torch.bfloat16)
    buffer.materialize()
    for view in buffer.views.values():
        view.fill_(1.0)
    ReduceScatter([buffer], op="sum", divide=3.0 * dist.get_world_size()).start().wait()
    third = torch.tensor(1.0) / 3
    for view in buffer.local_views.values():
        torch.testing.assert_close(view, third.expand_as(view), rtol=1e-6, atol=0)


def accumulate(layout, full_dtype):
    buffer = make(layout, full_dtype=full_dtype, alias=False)
    mine, total = gradients(dist.get_rank(), dist.get_world_size())
    for step in range(3):
        fill_views(buffer, mine)
        ReduceScatter([buffer], op="sum", divide=2.0).start(accumulate=step > 0).wait()
        buffer.release()
    assert_locals_equal(buffer, {name: value * 1.5 for name, value in total.items()})


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_accumulating_adds_to_the_shard(world_size, layout):
    for full_dtype in DTYPES:
        run_ranks(world_size, accumulate, layout, full_dtype)


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks("world_size")
def test_padding_of_the_shard_stays_zero_whatever_the_full_padding_holds(world_size):
    for layout, full_dtype in itertools.product(LAYOUTS, (torch.float32, torch.bfloat16)):
        buffer = make(layout, full_dtype=full_dtype)
        buffer.materialize()
        for flat in buffer.full:
            flat.fill_(float("nan"))
        fill_views(buffer, full_tensors())
        ReduceScatter([buffer]).start().wait()
        held = sum(view.abs().sum() for view in buffer.local_views.values())
        assert sum(shard.abs().sum() for shard in buffer.shard) == held


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("full_dtype", DTYPES)
@on_ranks(4)
def test_hybrid_sharding_reduces_inside_and_then_across(layout, full_dtype):
    mesh = mesh_of(2, 2)
    buffer = make(layout, mesh=mesh, full_dtype=full_dtype)
    assert buffer.mesh_view.size == 2
    mine, total = gradients(dist.get_rank(), 4)
    fill_views(buffer, mine)
    ReduceScatter([buffer], op="sum").start().wait()
    AllReduce([buffer], op="avg").start().wait()
    assert_locals_equal(buffer, {name: value / 2 for name, value in total.items()})
    AllReduce([buffer], op="sum").start().wait()
    assert_locals_equal(buffer, total)
    tensors = full_tensors(9)
    load(buffer, tensors)
    Gather([buffer]).start().wait()
    assert_views_equal(buffer, tensors)


@pytest.mark.parametrize("full_dtype", [torch.float32, torch.bfloat16])
@on_ranks(3)
def test_several_collectives_may_be_waited_for_in_every_order(full_dtype):
    tensors = [full_tensors(seed) for seed in range(3)]
    buffers = [make("split" if seed == 1 else "planned", full_dtype=full_dtype) for seed in range(3)]
    for buffer, values in zip(buffers, tensors, strict=True):
        load(buffer, values)
    for order in itertools.permutations(range(3)):
        handles = [Gather([buffer]).start() for buffer in buffers]
        for index in order:
            handles[index].wait()
            handles[index].wait()
            assert_views_equal(buffers[index], tensors[index])
        handles = [ReduceScatter([buffer], op="avg").start() for buffer in buffers]
        for index in order:
            handles[index].wait()
            assert_locals_equal(buffers[index], tensors[index])
            buffers[index].release()


@on_ranks(3)
def test_buffers_of_several_dtypes_and_segments_travel_in_one_call():
    mesh = mesh_of()
    one = make(mesh=mesh, dtype=torch.float32, full_dtype=torch.bfloat16)
    two = make("split", mesh=mesh, dtype=torch.float32)
    three = make(mesh=mesh, dtype=torch.float16)
    buffers, tensors = [one, two, three], full_tensors(5)
    for buffer in buffers:
        load(buffer, tensors)
    with record_collectives() as record:
        dbuffer.Gather(buffers).start().wait()
    assert record.kinds == ["all_gather"]
    for buffer in buffers:
        assert_views_equal(buffer, tensors)
    with record_collectives() as record:
        dbuffer.ReduceScatter(buffers, op="avg").start().wait()
    assert record.kinds == ["reduce_scatter"]
    for buffer in buffers:
        assert_locals_equal(buffer, tensors)


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks("world_size")
def test_a_buffer_with_a_collective_under_way_refuses_until_it_is_waited_for(world_size):
    buffer = make(full_dtype=torch.bfloat16)
    handle = Gather([buffer]).start()
    assert buffer.in_flight is handle
    for act in (buffer.release, Gather([buffer]).start, buffer.forget_neighbors):
        with pytest.raises(RuntimeError, match="under way; call wait"):
            act()
    states = [handle.completed]
    handle.wait()
    handle.wait()
    assert [*states, handle.completed] == [False, True]
    busy = [buffer.in_flight]
    buffer.wait()
    Gather([buffer]).start()
    buffer.wait()
    assert [*busy, buffer.in_flight] == [None, None]
    buffer.release()
    buffer.release()


@on_ranks(2)
def test_a_collective_that_fails_says_which_and_of_which_buffers_each_time():
    group = dist.new_group(timeout=timedelta(seconds=2))  # its own, so that what breaks is not used again
    mesh = DeviceMesh.from_group(group, "cpu")
    buffers = [make(mesh=mesh, name=name) for name in ("layers.7", "layers.8")]
    if dist.get_rank() == 1:
        return
    handle = Gather(buffers).start()
    errors = []
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"all_gather of layers\.7, layers\.8 failed") as caught:
            handle.wait()
        errors.append(caught.value)
    assert errors[0] is errors[1]
    assert not handle.completed
    for buffer in buffers:
        buffer.release()
