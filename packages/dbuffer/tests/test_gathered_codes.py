"""Gathers of codes that are not read back: codes of whole tensors, and nothing else is held."""

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import can_swap, load, mesh_of, quantized_whole
from test_blocks_on_wire import FORMATS, Broken, layout_for, tensors

import dbuffer
from dbuffer import (
    BlockQuantizedTensor,
    BlocksAtRest,
    BlocksOnWire,
    DBuffer,
    Gather,
    Recycler,
)
from ragged_shard.testing import on_ranks


def make(fmt, cut="whole", at_rest=False, **options):
    layout = layout_for(fmt, dist.get_world_size(), cut)
    wire = BlocksAtRest(fmt, read_back=False) if at_rest else BlocksOnWire(fmt, cut, read_back=False)
    return DBuffer(layout, mesh_of(), dtype=torch.float32, full_dtype=torch.bfloat16, wire=wire, **options)


def assert_views_are_codes_of_whole_tensors(buffer, fmt, full):
    for name, view in buffer.views.items():
        codes, scales, values = quantized_whole(fmt, full[name])
        assert isinstance(view, BlockQuantizedTensor)
        assert (view.shape, view.dtype) == (full[name].shape, torch.bfloat16)
        assert view.codes.equal(codes.view(-1)), name
        assert view.scales.equal(scales), name
        assert view.dequantize().equal(values.bfloat16()), name


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@on_ranks("ranks")
def test_views_are_the_codes_of_whole_tensors_at_any_number_of_ranks(ranks):
    for fmt in FORMATS:
        for cut, at_rest in (("whole", False), ("shared", False), ("whole", True)):
            if cut == "shared" and not fmt.shares_amax:
                continue
            buffer, full = make(fmt, cut, at_rest), tensors()
            views = buffer.empty_views
            for seed in range(2):
                full = tensors(seed)
                load(buffer, full)
                dbuffer.share_amax([buffer]) if cut == "shared" else None
                Gather([buffer]).start().wait()
                assert_views_are_codes_of_whole_tensors(buffer, fmt, full)
                assert buffer.views is views
                buffer.release()


@on_ranks(3)
def test_codes_and_a_scale_a_tile_are_all_that_is_held():
    recycler, ranks = Recycler("cpu", lean=True), dist.get_world_size()
    buffer = make(FORMATS[0], recycler=recycler)
    assert recycler.stats.lent_bytes == 0
    assert not any(scratch.flat.untyped_storage().nbytes() for scratch in buffer.encoder.scratch)
    load(buffer, tensors())
    codes = ranks * sum(segment.shard_size for segment in buffer.layout.segments)
    planes = buffer.encoder._planes
    scales = 4 * dbuffer.num_gathered_scales(planes)
    handle = Gather([buffer]).start()
    assert recycler.stats.lent_bytes == codes + scales + 4 * ranks * planes.num_scales  # as they arrive
    handle.wait()
    assert recycler.stats.lent_bytes == codes + scales
    buffer.release()
    assert (recycler.stats.lent_bytes, recycler.stats.quarantined_bytes) == (0, 0)
    with pytest.raises(RuntimeError, match="views after release"):
        _ = buffer.views


@on_ranks(4)
def test_neighbors_gather_the_codes_that_they_kept():
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[dist.get_rank() // 2]
    buffer, full = make(FORMATS[0]), tensors()
    load(buffer, full)
    Gather([buffer]).start().wait()
    with pytest.raises(RuntimeError, match="call keep_codes_for before the gather"):
        buffer.shrink(mine)
    buffer.release()
    buffer.keep_codes_for(mine)
    Gather([buffer]).start().wait()
    buffer.shrink(mine)
    Gather([buffer]).start().wait()
    assert_views_are_codes_of_whole_tensors(buffer, FORMATS[0], full)


@can_swap
@on_ranks(2)
def test_a_failed_gather_leaves_no_memory_to_the_views():
    broken = Broken()
    buffer = make(FORMATS[0], transport=lambda _: broken, recycler=Recycler("cpu"))
    load(buffer, tensors())
    with pytest.raises(RuntimeError, match="a peer died"):
        Gather([buffer]).start().wait()
    first = [view.codes.untyped_storage().nbytes() for view in buffer.empty_views.values()]
    assert not any(first)  # a write that comes late goes where nobody looks
