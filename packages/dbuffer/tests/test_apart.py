"""Shards on another device than the gathered memory, and gathered memory shrunk to slices among few ranks.

A CPU with an index stands for the other device: its memory is the same, data take the way of offloaded shards.
"""

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
    zero,
)

from dbuffer import Gather, ReduceScatter
from ragged_shard.testing import on_ranks, record_collectives, run_ranks

PAIRS = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks("world_size")
def test_shards_on_another_device_gather_and_reduce_the_same_values(world_size, layout):
    tensors, each = full_tensors(), [full_tensors(seed=r + 1) for r in range(world_size)]
    total = {name: sum(one[name] for one in each) for name in tensors}
    for dtype, full_dtype in PAIRS:
        buffer = make(layout, dtype=dtype, full_dtype=full_dtype, shard_device="cpu:0")
        assert buffer.offloaded
        assert not buffer.aliased
        load(buffer, tensors)
        Gather([buffer]).start().wait()
        assert_views_equal(buffer, tensors)
        for times, accumulate in ((1, False), (2, True)):
            fill_views(buffer, each[dist.get_rank()])
            ReduceScatter([buffer], op="sum", divide=2).start(accumulate=accumulate).wait()
            assert_locals_equal(buffer, {name: t * times / 2 for name, t in total.items()})
        buffer.release()


def shrink_and_gather(layout, dtype, full_dtype, size):
    buffer = make(layout, dtype=dtype, full_dtype=full_dtype)
    tensors = full_tensors()
    load(buffer, tensors)
    groups = [
        dist.new_group([*range(first, first + size)]) for first in range(0, dist.get_world_size(), size)
    ]
    group = groups[dist.get_rank() // size]
    Gather([buffer]).start().wait()
    buffer.shrink(group)
    assert not buffer.gathered.present
    zero(buffer.shard)  # what was kept is what comes back, not the shards
    with record_collectives() as record:
        Gather([buffer]).start().wait()
    assert_views_equal(buffer, tensors)
    sent = sum(shard.numel() for shard in buffer.full) * full_dtype.itemsize * (size - 1) / size
    assert record.bytes_sent == sent
    buffer.release()
    Gather([buffer]).start().wait()  # kept for one gather only
    assert all(not view.any() for view in buffer.views.values())
    buffer.shrink(group)
    load(buffer, tensors)
    buffer.forget_neighbors()
    Gather([buffer]).start().wait()
    assert_views_equal(buffer, tensors)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_shrunk_buffer_is_gathered_again_among_few_ranks(layout):
    for dtype, full_dtype in PAIRS:
        run_ranks(4, shrink_and_gather, layout, dtype, full_dtype, 2)


@on_ranks(3)
def test_a_group_whose_size_does_not_divide_is_refused():
    buffer = make("planned")
    buffer.materialize()
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        with pytest.raises(ValueError, match="cannot shrink to 2 ranks, which does not divide 3"):
            buffer.shrink(pair)
