"""Block grids: how scales lie, which layouts are refused, how blocks of neighbours are put together."""

import pytest
import torch
from runs import full
from torch.distributed.tensor import Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute

from block_optim import AdamW8bit
from block_optim.adam.q8.grid import Grid, Stretch, merged
from layout_planner import Elements, Tile
from ragged_shard import RaggedShard, distribute_tensor
from ragged_shard.testing import on_ranks, rank_mesh


@pytest.mark.parametrize(
    ("shape", "block", "scales", "cuts"),
    [
        ((5, 6), Tile(2, 4), (3, 2), {0: 0, 12: 2, 24: 4, 30: 6}),
        ((2, 3, 4), Tile(2, 4), (2, 2, 1), {0: 0, 8: 1, 12: 2, 20: 3, 24: 4}),
        ((10,), Elements(4), (3,), {0: 0, 4: 1, 8: 2, 10: 3}),
    ],
)
def test_scales_before_a_cut_are_counted_and_other_places_are_no_cuts(shape, block, scales, cuts):
    grid = Grid(shape, block)
    assert grid.scale_shape == scales
    numel = torch.Size(shape).numel()
    assert {i: n for i in range(numel + 1) if (n := grid.scales_before(i)) is not None} == cuts


def test_whole_tiles_of_neighbours_are_one_stretch_and_short_ones_are_not():
    full, more, other = (Stretch(s, 4, 8, (2, 4), c) for s, c in ((0, 0), (32, 4), (70, 8)))
    assert merged([full, more, other]) == [Stretch(0, 8, 8, (2, 4), 0), other]
    short = Stretch(0, 3, 8, (2, 4), 0)
    assert merged([short, Stretch(24, 4, 8, (2, 4), 4)]) == [short, Stretch(24, 4, 8, (2, 4), 4)]
    assert short.num_scales == 4
    assert short.bands(1, 1) == Stretch(16, 1, 8, (2, 4), 2)


@on_ranks(3)
def test_a_layout_that_cuts_a_block_is_refused_on_every_rank_with_the_way_out():
    mesh = rank_mesh(3)
    rows = torch.nn.Parameter(torch_distribute(torch.ones(100, 64), mesh, [Shard(0)]))
    with pytest.raises(
        ValueError, match=r"w: what rank 1 holds begins at element 2176, inside a block of tile:32x32"
    ):
        AdamW8bit([("w", rows)], block=Tile(32, 32))
    with pytest.raises(ValueError, match=r"block_policy=AdamW8bit\.block_policy"):
        AdamW8bit([("w", rows)], block=Elements(256))
    AdamW8bit([("w", rows)], block=Tile(34, 32))
    columns = torch.nn.Parameter(torch_distribute(torch.ones(100, 64), mesh, [Shard(1)]))
    with pytest.raises(ValueError, match=r"w: .* its axes cut through blocks of elements:256; choose a Tile"):
        AdamW8bit([("w", columns)], block=Elements(256))
    AdamW8bit([{"params": [("w", columns)], "quantize": False}], block=Elements(256))


@on_ranks(4)
def test_stacked_experts_on_two_mesh_axes_have_the_same_blocks():
    """Expert parallelism cuts the stack, the ragged axis cuts between bands inside each part."""
    mesh = rank_mesh(2, 2)
    weight, grad = (torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    placements = [Shard(0), RaggedShard((0, 1), (3, 5))]
    for block in (Tile(4, 16), Elements(128)):
        plain = torch.nn.Parameter(weight.clone())
        theirs = AdamW8bit([("w", plain)], min_8bit_numel=1, block=block)
        param = torch.nn.Parameter(distribute_tensor(weight, mesh, placements, src_data_rank=None))
        ours = AdamW8bit([("w", param)], min_8bit_numel=1, block=block)
        for _ in range(2):
            plain.grad = grad
            param.grad = distribute_tensor(grad, mesh, placements, src_data_rank=None)
            theirs.step()
            ours.step()
        assert torch.equal(full(param.detach()), plain)
        for key, value in theirs.state[plain].items():
            assert torch.equal(full(ours.state[param][key]), value), key
