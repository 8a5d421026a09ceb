"""A buffer on simulated ranks behaves as the GPU tests expect."""

import pytest
import torch
from dbuffer_helpers import fill_views, full_tensors, make, simulated_mesh

import dbuffer
from dbuffer import Gather


@pytest.mark.parametrize("layout", ["planned", "split"])
@pytest.mark.parametrize("full_dtype", [torch.float32, torch.bfloat16])
def test_every_simulated_rank_holds_what_this_one_holds(layout, full_dtype):
    with simulated_mesh(4, "cpu") as mesh:
        buffer = make(layout, mesh=mesh, full_dtype=full_dtype, check_ranks=False)
        for shard in buffer.shard:
            shard.copy_(torch.arange(len(shard)) % 100)
        Gather([buffer]).start().wait()
        for shard, full in zip(buffer.shard, buffer.full, strict=True):
            assert full.view(4, -1).eq(shard.to(full_dtype)).all()
        fill_views(buffer, full_tensors())
        dbuffer.ReduceScatter([buffer], op="sum").start().wait()
        for name, view in buffer.local_views.items():
            held = full_tensors()[name].flatten()[: view.numel()].view(view.shape)
            assert view.equal(4 * held)
