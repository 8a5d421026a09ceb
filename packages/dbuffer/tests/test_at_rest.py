"""Shards that are codes: those of whole tensors, in so many bytes, written by copying values and by nothing else."""

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import load, mesh_of, quantized_tensor, quantized_whole, random_tensors

import dbuffer
from dbuffer import DBuffer, Gather
from dbuffer.encodings import BlockFP8, BlockInt8, BlockNF4, BlockQuantizedTensor, BlocksAtRest
from layout_planner import Rows, TensorSpec, Tile, plan
from ragged_shard.testing import on_ranks, record_collectives

SHAPES = {"short": (75, 130), "wide": (16, 300), "stack": (3, 20, 128), "bias": (37,), "one": ()}
FORMATS = (BlockNF4(64), BlockInt8(128), BlockFP8((16, 16)))


@functools.cache
def layout_for(fmt, world_size):
    specs = [
        TensorSpec(name, shape, Tile(fmt.tile[0], 1) if len(shape) > 1 else Rows(max(1, *shape, 1)))
        for name, shape in SHAPES.items()
    ]
    return plan(specs, world_size, align=16)


tensors = functools.partial(random_tensors, SHAPES)


def make(fmt, full_dtype=torch.bfloat16, **options):
    layout = layout_for(fmt, dist.get_world_size())
    return DBuffer(
        layout, mesh_of(), dtype=torch.float32, full_dtype=full_dtype, wire=BlocksAtRest(fmt), **options
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@on_ranks("ranks")
def test_a_shard_is_the_codes_of_whole_tensors_and_is_what_travels(ranks):
    size = dist.get_world_size()
    for fmt in FORMATS:
        buffer, full = make(fmt), tensors()
        load(buffer, full)
        for name, local in buffer.local_views.items():
            assert isinstance(local, BlockQuantizedTensor)
            codes, scales, values = quantized_whole(fmt, full[name])
            run = local.run
            assert local.codes.view(-1, codes.shape[1]).equal(codes[run.start : run.stop])
            assert local.scales.equal(scales[slice(*run.grid.scales_of(run.start, run.stop))])
            assert local.dequantize().equal(buffer.geometry.cut(name, values))
        row = buffer.wire.row_bytes(buffer.geometry)
        assert sum(flat.nbytes for flat in buffer.shard) == row  # and nothing else is kept
        with record_collectives() as record:
            Gather([buffer]).start().wait()
        assert record.kinds == ["all_gather"] * (size > 1)
        assert record.bytes_sent == (size - 1) * row
        for name, view in buffer.views.items():
            assert view.equal(quantized_whole(fmt, full[name])[2].bfloat16()), name


@pytest.mark.parametrize(
    ("fmt", "most"), [(BlockNF4(64), 0.56), (BlockInt8(256), 1.016), (BlockFP8((128, 128)), 1.0003)]
)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bytes_at_rest_are_those_of_the_formula(fmt, most, ranks):
    shapes = {"up": (1024, 512), "down": (512, 1024), "square": (512, 512)}
    layout = plan([TensorSpec(n, s, Rows(fmt.tile[0])) for n, s in shapes.items()], ranks, align=16)
    geometry = dbuffer.geometry_of(layout, 0)
    exact = 0.0
    for rows, columns in shapes.values():
        tiles = -(-rows // fmt.tile[0]) * -(-columns // fmt.tile[1])
        exact += rows * fmt.code_bytes(columns) + 4 * tiles
    at_rest = ranks * BlocksAtRest(fmt).row_bytes(geometry)
    most_held = 1.005 * (exact + layout.padding)  # each rank keeps as much as the one that has most
    assert exact <= at_rest <= most_held
    assert ranks > 2 or at_rest / layout.numel <= most


@on_ranks(1)
def test_copying_quantizes_and_counts_as_a_write_of_the_shard():
    buffer = make(BlockNF4(64))
    load(buffer, tensors())
    short = buffer.local_views["short"]
    version = buffer.shard[0]._version
    short.copy_(torch.zeros(short.shape))
    assert not short.dequantize().any()
    assert buffer.shard[0]._version > version


def a_tensor(fmt=FORMATS[0]):
    return quantized_tensor(fmt, torch.randn(6, 130, generator=torch.Generator().manual_seed(1)))


def test_reading_gives_values():
    tensor = a_tensor()
    values = tensor.dequantize()
    assert type(values) is torch.Tensor
    assert (tensor + 1).equal(values + 1)
    assert tensor.reshape(-1)[:3].equal(values.view(-1)[:3])
    assert torch.cat([tensor, tensor]).shape == (12, 130)
    assert values.new_zeros(6, 130).copy_(tensor).equal(values)


@pytest.mark.parametrize("copied", [torch.clone, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_copies_hold_the_same_codes_in_memory_of_their_own(copied):
    tensor = a_tensor()
    other = copied(tensor)
    assert isinstance(other, BlockQuantizedTensor)
    assert other.codes.equal(tensor.codes)
    assert other.codes.data_ptr() != tensor.codes.data_ptr()
    other.copy_(torch.ones(other.shape))
    assert not other.dequantize().equal(tensor.dequantize())


def test_moving_changes_device_and_dtype_of_values_but_no_code():
    tensor = a_tensor()
    half: Any = tensor.to(torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert half.codes.equal(tensor.codes)
    assert half.dequantize().equal(tensor.dequantize().bfloat16())
    meta: Any = tensor.to("meta")
    assert meta.is_meta
    assert meta.codes.is_meta
    empty: Any = torch.empty_like(meta, device="cpu")
    assert empty.codes.nbytes == tensor.codes.nbytes
    assert empty.copy_(tensor).dequantize().equal(tensor.dequantize())


def test_codes_of_another_format_are_read_back_and_quantized():
    tensor, other = a_tensor(), a_tensor(BlockInt8(64))
    tensor.copy_(other)
    expected = a_tensor()
    expected.copy_(other.dequantize())
    assert tensor.codes.equal(expected.codes)
