"""Another wire form needs no change of the buffer: here, codes of one byte and a scale a rank."""

import pytest
import torch
from dbuffer_helpers import full_tensors, load, make

from dbuffer import Encoder, Gather, Geometry, WireForm
from ragged_shard.testing import on_ranks, record_collectives


class Quantized(WireForm):
    """One-byte codes with one fp32 scale (kept in 16 bytes) for each rank and segment."""

    def dtypes(self, shard, gathered):
        if not shard.is_floating_point:
            raise ValueError(f"{shard} cannot be quantized")
        return (torch.int8,)

    def encoder(self, geometry, gathered, recycler):
        assert isinstance(geometry, Geometry)
        return QuantizedEncoder(gathered)


class QuantizedEncoder(Encoder):
    def __init__(self, gathered):
        self.gathered = gathered
        self.pairs = []

    def encode(self, shards):
        self.pairs = []
        for shard, gathered in zip(shards, self.gathered.raw, strict=True):
            ranks = gathered.numel() // shard.numel()
            scale = (shard.abs().max() / 127).clamp_min(1e-12).float().expand(4).contiguous()
            codes = (shard / scale[0]).round().to(torch.int8)
            self.pairs += [
                (torch.empty(ranks * codes.numel(), dtype=torch.int8), codes),
                (torch.empty(ranks * 4), scale),
            ]
        return self.pairs

    def decode(self):
        for index, gathered in enumerate(self.gathered.raw):
            codes, scales = (receive for receive, _ in self.pairs[2 * index : 2 * index + 2])
            per_rank = codes.view(len(scales) // 4, -1) * scales[::4, None]
            gathered.copy_(per_rank.view(-1))
        return True


@pytest.mark.parametrize("layout", ["planned", "split"])
@on_ranks(2)
def test_a_quantizing_wire_form_plugs_in(layout):
    buffer, tensors = make(layout, align=16, full_dtype=torch.bfloat16, wire=Quantized()), full_tensors()
    load(buffer, tensors)
    with record_collectives() as record:
        Gather([buffer]).start().wait()
    assert record.kinds == ["all_gather"]
    for name, view in buffer.views.items():
        torch.testing.assert_close(view.float(), tensors[name], rtol=0, atol=0.1)
    assert record.bytes_sent == sum(shard.numel() + 16 for shard in buffer.shard)  # to the one other rank
