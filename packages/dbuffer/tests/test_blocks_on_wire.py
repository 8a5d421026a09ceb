"""Quantized gathers: what travels is what quantizing whole tensors gives, at any number of ranks, in so many bytes."""

import functools

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import can_swap, load, mesh_of, quantized_whole, random_tensors

from dbuffer import DBuffer, Gather, Recycler
from dbuffer._torch_compat import CAN_SWAP
from dbuffer.encodings import BlockFP8, BlockInt8, BlocksOnWire
from layout_planner import Rows, TensorSpec, Tile, plan
from ragged_shard.testing import on_ranks, record_collectives

SHAPES = {"short": (75, 50), "wide": (16, 100), "stack": (3, 20, 40), "bias": (37,)}
FORMATS = (BlockFP8((16, 16)), BlockFP8((32, 32), "fp32"), BlockInt8(32))


@functools.cache
def layout_for(fmt, world_size, cut="whole"):
    def block(name, shape):
        if len(shape) == 1:
            return Rows(shape[0])
        return Tile(*fmt.tile) if cut == "whole" else Rows(1)

    return plan(
        [TensorSpec(name, shape, block(name, shape)) for name, shape in SHAPES.items()], world_size, align=16
    )


tensors = functools.partial(random_tensors, SHAPES)


def make(fmt, full_dtype=torch.bfloat16, **options):
    layout, wire = layout_for(fmt, dist.get_world_size()), BlocksOnWire(fmt)
    return DBuffer(layout, mesh_of(), dtype=torch.float32, full_dtype=full_dtype, wire=wire, **options)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@on_ranks("ranks")
def test_values_are_those_of_whole_tensors(ranks):
    size = dist.get_world_size()
    for fmt in FORMATS:
        for dtype in (torch.bfloat16, torch.float32):
            buffer, full = make(fmt, dtype), tensors()
            load(buffer, full)
            with record_collectives() as record:
                Gather([buffer]).start().wait()
            for name, view in buffer.views.items():
                assert view.equal(quantized_whole(fmt, full[name])[2].to(dtype)), name
            sent = [event.bytes_sent for event in record.events if event.kind == "all_gather"]
            assert sent == [(size - 1) * buffer.wire.row_bytes(buffer.geometry)] * (size > 1)


@on_ranks(2)
def test_codes_are_kept_until_the_shard_changes_and_memory_is_recycled():
    recycler = Recycler("cpu")
    buffer = make(FORMATS[0], recycler=recycler)
    load(buffer, tensors())
    Gather([buffer]).start().wait()
    # The receive buffer was given back.
    assert recycler.stats.lent_bytes == sum(full.nbytes for full in buffer.full)
    buffer.encoder.codes.zero_()
    buffer.release()
    Gather([buffer]).start().wait()
    assert not any(view.any() for view in buffer.views.values())  # codes were sent again as they were
    allocations = recycler.stats.allocations
    for change in (lambda: buffer.shard[0].mul_(1), buffer.forget_encoding):
        change()
        buffer.release()
        Gather([buffer]).start().wait()
        assert buffer.views["wide"].equal(quantized_whole(FORMATS[0], tensors()["wide"])[2].bfloat16())
        buffer.encoder.codes.zero_()
    assert recycler.stats.allocations == allocations or not CAN_SWAP


class Broken:
    """A transport whose gathers fail, and of which nobody knows whether anything still reads what was sent."""

    name = "broken"

    def all_gather(self, pairs, label):
        self.sent = [send for _, send in pairs]
        return self

    quiet, under_way = False, False

    def is_completed(self):
        return True

    def wait(self):
        raise RuntimeError("a peer died")


@can_swap
@on_ranks(2)
def test_codes_of_a_failed_gather_are_never_written_again():
    broken, recycler = Broken(), Recycler("cpu")
    buffer = make(FORMATS[0], recycler=recycler, transport=lambda _: broken)
    load(buffer, tensors())
    with pytest.raises(RuntimeError, match="a peer died"):
        Gather([buffer]).start().wait()
    sent, quarantined = broken.sent, recycler.stats.quarantined_bytes
    codes = [one.clone() for one in sent]
    assert quarantined >= sum(len(flat) for flat in buffer.shard) * dist.get_world_size()
    buffer.shard[0].mul_(-3)
    with pytest.raises(RuntimeError, match="a peer died"):
        Gather([buffer]).start().wait()
    assert all(map(torch.equal, sent, codes))
    assert not {one.data_ptr() for one in sent} & {one.data_ptr() for one in broken.sent}


@on_ranks(3)
def test_a_tile_with_a_bad_number_is_all_nan_on_every_rank():
    buffer, full = make(FORMATS[0]), tensors()
    full["short"][20, 20] = torch.nan
    full["wide"][3, 99] = -torch.inf
    load(buffer, full)
    Gather([buffer]).start().wait()
    short, wide = buffer.views["short"], buffer.views["wide"]
    assert short[16:32, 16:32].isnan().all()
    assert int(short.isnan().sum()) == 256
    assert wide[:, 96:].isnan().all()
    assert int(wide.isnan().sum()) == 64
