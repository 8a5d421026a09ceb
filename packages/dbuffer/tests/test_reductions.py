"""Reductions in a wire form equal one process that encodes each contribution and adds up in fp32, by bits."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import SPECS, assert_locals_equal, fill_views, make, mesh_of, random_tensors

import dbuffer
from dbuffer import DBuffer, Recycler, ReduceScatter
from dbuffer.encodings import BlockInt8, BlockReduction, CastReduction
from layout_planner import Rows, TensorSpec, plan
from ragged_shard.testing import on_ranks, record_collectives

BF16 = CastReduction()


def gradients(rank):
    return random_tensors({spec.name: spec.shape for spec in SPECS}, rank)


def expected(world_size, dtype, on_wire, scale):
    """The mean in fp32, in the order of the ranks, of what each rank has in its buffer, as it travels."""
    sums: dict[str, torch.Tensor] = {}
    for rank in range(world_size):
        for name, grad in gradients(rank).items():
            sent = grad.to(dtype).to(on_wire).float()
            sums[name] = sums[name] + sent if rank else sent
    return {name: total * scale for name, total in sums.items()}


@pytest.mark.parametrize("layout", ["planned", "split"])
@pytest.mark.parametrize(
    ("form", "kept", "gathered"),
    [
        (BF16, torch.float32, torch.float32),
        (BF16, torch.float32, torch.bfloat16),
        (BF16, torch.bfloat16, torch.bfloat16),
        (CastReduction(None), torch.float32, torch.float32),
    ],
)
@on_ranks(3)
def test_contributions_are_cast_once_and_summed_in_fp32_in_the_order_of_ranks(layout, form, kept, gathered):
    size = dist.get_world_size()
    on_wire = form.dtype or gathered
    buffer = make(layout, dtype=kept, full_dtype=gathered, reduction=form)
    ways: Any = (("avg", None, 1 / size), ("sum", None, 1.0), ("sum", 8.0, 0.125))
    for op, divide, scale in ways:
        buffer.materialize()
        buffer.full[0][-1] = torch.nan  # what is in padding is nobody's gradient
        fill_views(buffer, gradients(dist.get_rank()))
        with record_collectives() as record:
            ReduceScatter([buffer], op=op, divide=divide).start().wait()
        assert_locals_equal(buffer, expected(size, gathered, on_wire, scale))
        row = sum(-(-len(shard) * on_wire.itemsize // 16) * 16 for shard in buffer.shard)
        assert record.kinds == ["all_to_all"]
        assert record.bytes_sent == (size - 1) * row
        buffer.release()


@on_ranks(3)
def test_several_buffers_travel_in_one_all_to_all_with_memory_of_the_recycler():
    mesh, recycler = mesh_of(), Recycler("cpu")
    buffers = [
        make(mesh=mesh, full_dtype=dtype, reduction=form, recycler=recycler, alias=False)
        for dtype, form in ((torch.float32, BF16), (torch.float32, CastReduction(None)))
    ]
    for buffer in buffers:
        fill_views(buffer, gradients(dist.get_rank()))
    before = recycler.stats.lent_bytes
    with record_collectives() as record:
        handle = dbuffer.ReduceScatter(buffers, op="sum").start()
    during = recycler.stats.lent_bytes
    handle.wait()
    for buffer, on_wire in zip(buffers, (torch.bfloat16, torch.float32), strict=True):
        assert_locals_equal(buffer, expected(dist.get_world_size(), torch.float32, on_wire, 1.0))
    rows = sum(len(shard) * 6 for shard in buffers[0].shard)
    assert record.kinds == ["all_to_all"]
    forms = [(form, buffers[0].geometry, torch.float32) for form in (BF16, CastReduction(None))]
    sent_and_received = 2 * rows * dist.get_world_size()
    assert during - before == forms[0][0].scratch_bytes(forms) == sent_and_received
    assert recycler.stats.lent_bytes == before


@on_ranks(3)
def test_large_rows_go_from_rank_to_rank():
    size = dist.get_world_size()
    layout = plan([TensorSpec("w", (1 << 10, 1 << 10))], size)
    mine = [torch.randn(1 << 20, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    buffer = DBuffer(layout, mesh_of(), dtype=torch.float32, full_dtype=torch.bfloat16, reduction=BF16,
                     transport="auto")  # fmt: skip
    buffer.materialize()
    buffer.views["w"].view(-1).copy_(mine[dist.get_rank()])
    before = buffer.recycler.stats.lent_bytes
    handle = ReduceScatter([buffer], op="sum").start()
    received = BF16.scratch_bytes([(BF16, buffer.geometry, torch.bfloat16)])
    assert buffer.recycler.stats.lent_bytes - before == received  # sent from where it is
    handle.wait()
    total = mine[0].bfloat16().float()
    for one in mine[1:]:
        total = total + one.bfloat16().float()
    start, stop = layout.local_range("w", dist.get_rank())
    assert buffer.local_views["w"].reshape(-1).equal(total[start:stop])


ROWS = (
    TensorSpec("matrix", (37, 300)),
    TensorSpec("stack", (3, 5, 40)),
    TensorSpec("bias", (513,), Rows(513)),
)


def gradients_of(rank):
    return random_tensors({spec.name: spec.shape for spec in ROWS}, rank)


def of_rows(form, specs=ROWS):
    layout = plan(specs, dist.get_world_size(), align=16)
    return DBuffer(layout, mesh_of(), dtype=torch.float32, reduction=form, name="g", alias=False)


@on_ranks(2)
def test_int8_in_blocks_of_256_takes_26_percent_of_fp32():
    buffer = of_rows(BlockReduction(BlockInt8(256, rounding="stochastic")), (TensorSpec("w", (512, 1024)),))
    row = buffer.reduction.row_bytes(buffer.geometry, torch.float32)
    assert row / (4 * len(buffer.shard[0])) < 0.26
    assert row == len(buffer.shard[0]) * (1 + 4 / 256)


@on_ranks(3)
def test_codes_and_casts_go_in_one_all_to_all():
    """A buffer of codes and one of casts in one call, with odd sizes in front of the second."""
    buffers = [
        of_rows(BlockReduction(BlockInt8(64))),
        of_rows(CastReduction(None)),
        of_rows(BlockReduction(BlockInt8(64))),
    ]
    for buffer in buffers:
        buffer.materialize()
        for name, view in buffer.views.items():
            view.copy_(gradients_of(dist.get_rank())[name])
    with record_collectives() as record:
        dbuffer.ReduceScatter(buffers, op="avg").start().wait()
    assert record.kinds == ["all_to_all"]
    for name, exact in buffers[1].local_views.items():
        assert buffers[0].local_views[name].equal(buffers[2].local_views[name])
        torch.testing.assert_close(buffers[0].local_views[name], exact, rtol=0, atol=4 / 127)
        start, stop = buffers[1].layout.local_range(name, dist.get_rank())
        size = dist.get_world_size()
        total = sum(gradients_of(rank)[name].reshape(-1)[start:stop] for rank in range(size))
        torch.testing.assert_close(exact.reshape(-1), total / size)
