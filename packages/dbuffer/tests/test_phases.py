"""Gathers that move the codes of one phase: MXFP8's of rows for forward, of columns for backward."""

import functools

import torch
import torch.distributed as dist
from dbuffer_helpers import load, mesh_of, quantized_whole, random_tensors

import dbuffer
from dbuffer import BlockFP8, CodePlanes, DBuffer, Gather, PhasesOnWire, Recycler
from layout_planner import Rows, TensorSpec, Tile, plan
from ragged_shard.testing import on_ranks, record_collectives

ROWS, COLUMNS = BlockFP8((1, 32), "e8m0"), BlockFP8((32, 1), "e8m0")
SHAPES = {"short": (75, 50), "wide": (64, 100), "stack": (3, 40, 40)}


tensors = functools.partial(random_tensors, SHAPES)


def make(cut="whole", **options):
    blocks = {name: Tile(32, shape[-1]) if cut == "whole" else Rows(1) for name, shape in SHAPES.items()}
    specs = [TensorSpec(name, shape, blocks[name]) for name, shape in SHAPES.items()]
    layout = plan(specs, dist.get_world_size(), align=16)
    wire = PhasesOnWire(ROWS, cut, backward=COLUMNS)
    return DBuffer(layout, mesh_of(), dtype=torch.float32, full_dtype=torch.bfloat16, wire=wire, **options)


def assert_codes_of(views, fmt, full):
    for name in SHAPES:
        codes, scales, values = quantized_whole(fmt, full[name])
        assert views[name].codes.equal(codes.view(-1)), name
        assert views[name].scales.equal(scales), name
        assert views[name].dequantize().equal(values.bfloat16()), name


@on_ranks(3)
def test_a_gather_moves_the_codes_of_its_phase_and_no_others():
    buffer, full = make(), tensors()
    load(buffer, full)
    for forward, backward in ((True, False), (False, True), (True, True), (True, False)):
        buffer.choose_codes(forward=forward, backward=backward)
        with record_collectives() as record:
            Gather([buffer]).start().wait()
        assert record.kinds == ["all_gather"]
        moved = [ROWS] * forward + [COLUMNS] * backward
        nbytes = sum(CodePlanes(buffer.layout, fmt).row_bytes for fmt in moved)
        assert record.bytes_sent == (dist.get_world_size() - 1) * nbytes
        for fmt, views in ((ROWS, buffer.views), (COLUMNS, buffer.backward_views)):
            if fmt in moved:
                assert_codes_of(views, fmt, full)
        buffer.release()


@on_ranks(3)
def test_both_codes_are_kept_until_the_shard_changes():
    recycler = Recycler("cpu")
    buffer = make(recycler=recycler)
    load(buffer, tensors())
    for change in (False, True):
        for backward in (False, True):
            buffer.choose_codes(forward=not backward, backward=backward)
            encoder = buffer.encoder.columns if backward else buffer.encoder.rows
            assert encoder.is_stale(buffer.shard) is (change or not encoder.codes)
            Gather([buffer]).start().wait()
            buffer.release()
        with torch.no_grad():
            buffer.shard[0].add_(1)
    buffer.choose_codes(forward=True, backward=True)
    Gather([buffer]).start().wait()
    buffer.release()
    for stale in (False, True):
        encoders = (buffer.encoder.rows, buffer.encoder.columns)
        assert [encoder.is_stale(buffer.shard) for encoder in encoders] == [stale, stale]
        buffer.forget_encoding()
    assert recycler.stats.lent_bytes == 0


@on_ranks(2)
def test_a_failed_gather_takes_both_codes_out_of_use():
    buffer = make()
    load(buffer, tensors())
    buffer.choose_codes(forward=True, backward=True)
    Gather([buffer]).start().wait()
    buffer.retire()
    for encoder in (buffer.encoder.rows, buffer.encoder.columns):
        assert not encoder.codes
        assert encoder.is_stale(buffer.shard)


@on_ranks(3)
def test_the_amax_of_cut_columns_takes_one_all_reduce():
    buffer, full = make("shared"), tensors()
    load(buffer, full)
    assert buffer.encoder.columns.num_shared > 0
    with record_collectives() as record:
        dbuffer.share_amax([buffer])
    assert record.kinds == ["all_reduce"]
    buffer.choose_codes(forward=True, backward=True)
    Gather([buffer]).start().wait()
    assert_codes_of(buffer.views, ROWS, full)
    assert_codes_of(buffer.backward_views, COLUMNS, full)
