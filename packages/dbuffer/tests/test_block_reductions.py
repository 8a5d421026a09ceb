"""Gradients as integer codes: the bytes and the calls of a reduction."""

import torch
import torch.distributed as dist
from dbuffer_helpers import mesh_of, random_tensors

import dbuffer
from dbuffer import DBuffer
from dbuffer.encodings import BlockInt8, BlockReduction, CastReduction
from layout_planner import Rows, TensorSpec, plan
from ragged_shard.testing import on_ranks, record_collectives

SPECS = (
    TensorSpec("matrix", (37, 300)),
    TensorSpec("stack", (3, 5, 40)),
    TensorSpec("bias", (513,), Rows(513)),
)
STOCHASTIC, NEAREST = BlockInt8(256, rounding="stochastic"), BlockInt8(64)


def gradients(rank):
    return random_tensors({spec.name: spec.shape for spec in SPECS}, rank)


def make(form, specs=SPECS, **options):
    layout = plan(specs, dist.get_world_size(), align=16)
    return DBuffer(layout, mesh_of(), dtype=torch.float32, reduction=form, name="g", alias=False, **options)


@on_ranks(2)
def test_int8_in_blocks_of_256_takes_26_percent_of_fp32():
    buffer = make(BlockReduction(STOCHASTIC), (TensorSpec("w", (512, 1024)),))
    row = buffer.reduction.row_bytes(buffer.geometry, torch.float32)
    assert row / (4 * len(buffer.shard[0])) < 0.26
    assert row == len(buffer.shard[0]) * (1 + 4 / 256)


@on_ranks(3)
def test_codes_and_casts_go_in_one_all_to_all():
    """A buffer of codes and one of casts in one call, with odd sizes in front of the second."""
    buffers = [make(BlockReduction(NEAREST)), make(CastReduction(None)), make(BlockReduction(NEAREST))]
    for buffer in buffers:
        buffer.materialize()
        for name, view in buffer.views.items():
            view.copy_(gradients(dist.get_rank())[name])
    with record_collectives() as record:
        dbuffer.ReduceScatter(buffers, op="avg").start().wait()
    assert record.kinds == ["all_to_all"]
    for name, exact in buffers[1].local_views.items():
        assert buffers[0].local_views[name].equal(buffers[2].local_views[name])
        torch.testing.assert_close(buffers[0].local_views[name], exact, rtol=0, atol=4 / 127)
        start, stop = buffers[1].layout.local_range(name, dist.get_rank())
        size = dist.get_world_size()
        total = sum(gradients(rank)[name].reshape(-1)[start:stop] for rank in range(size))
        torch.testing.assert_close(exact.reshape(-1), total / size)
