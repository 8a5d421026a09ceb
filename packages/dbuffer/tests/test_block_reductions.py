"""Gradients as integer codes: each contribution quantized once, decoded and summed in fp32 in the order of ranks."""

import zlib

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import mesh_of, quantized_whole, random_tensors

import dbuffer
from dbuffer import BlockInt8, BlockReduction, CastReduction, DBuffer, Noise, ReduceScatter
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


@pytest.mark.parametrize("fmt", [NEAREST, STOCHASTIC], ids=str)
@on_ranks(3)
def test_each_contribution_is_quantized_once_and_summed_in_the_order_of_ranks(fmt):
    size, rank = dist.get_world_size(), dist.get_rank()
    buffer = make(BlockReduction(fmt))
    for step in (1, 2):
        buffer.materialize()
        buffer.full[0].fill_(torch.nan)
        for name, view in buffer.views.items():
            view.copy_(gradients(rank)[name])
        with record_collectives() as record:
            ReduceScatter([buffer], op="sum").start().wait()
        row = buffer.reduction.row_bytes(buffer.geometry, torch.float32)
        assert record.kinds == ["all_to_all"]
        assert record.bytes_sent == (size - 1) * row
        for name, view in buffer.local_views.items():
            total = None
            for sender in range(size):
                noise = Noise(zlib.crc32(b"g"), step, sender) if fmt.needs_noise else None
                one = quantized_whole(fmt, gradients(sender)[name], buffer.layout.offset(name), noise)[2]
                total = one if total is None else total + one
            start, stop = buffer.layout.local_range(name, rank)
            assert view.reshape(-1).equal(total.reshape(-1)[start:stop]), name
        assert not any(gap.any() for gap in buffer.shard_memory.gaps)


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


@on_ranks(2)
def test_the_mean_of_stochastic_rounding_is_the_gradient_within_four_sigma():
    """The mean of many reductions of the same gradient, in standard errors from the gradient itself."""
    buffer, trials = (
        make(BlockReduction(BlockInt8(64, rounding="stochastic")), (TensorSpec("w", (8, 64)),)),
        300,
    )
    grad = torch.linspace(-1, 1, 512).view(8, 64) ** 3
    total = torch.zeros_like(buffer.local_views["w"])
    for _ in range(trials):
        buffer.materialize()
        buffer.views["w"].copy_(grad)
        ReduceScatter([buffer], op="avg").start().wait()
        total += buffer.local_views["w"]
    start, stop = buffer.layout.local_range("w", dist.get_rank())
    want = grad.reshape(-1)[start:stop].view(total.shape)
    step = (
        grad.abs().amax(dim=1)[start // 64 : stop // 64, None] / 127
    )  # uniform noise within one step, at most
    error = (total / trials - want) / (step / 2 / (trials * dist.get_world_size()) ** 0.5)
    assert (total / trials - want).abs().max() > 0
    assert error.abs().max() < 4  # in sigmas


@on_ranks(3)
def test_an_infinite_gradient_of_one_rank_makes_its_block_nan():
    buffer = make(BlockReduction(STOCHASTIC))
    buffer.materialize()
    for name, view in buffer.views.items():
        view.copy_(gradients(dist.get_rank())[name])
    if dist.get_rank() == 1:
        buffer.views["matrix"][20, 299] = torch.inf
    ReduceScatter([buffer]).start().wait()
    start, stop = buffer.layout.local_range("matrix", dist.get_rank())
    bad = buffer.local_views["matrix"].reshape(-1).isnan().nonzero().flatten() + start
    inside = torch.arange(20 * 300 + 256, 21 * 300)
    assert bad.equal(inside[(inside >= start) & (inside < stop)])
