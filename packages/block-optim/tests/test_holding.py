"""Who holds what: one answer for every placement, the same as the tensors' own."""

import random

import pytest
import torch
from runs import placed, world_mesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute

from block_optim import AdamW8bit, Muon, Param, Shampoo
from block_optim.core.holding import Holding, boxes_of
from layout_planner import Tile
from ragged_shard import RaggedShard, StridedRaggedShard, distribute_tensor
from ragged_shard.testing import run_ranks


def agrees(tensor):
    """The holding of a tensor gives this rank the elements that it has; returns the holding."""
    param = Param(tensor, "w")
    holding = param.holding
    full = torch.arange(param.numel, dtype=torch.float32)
    start, stop = holding.own
    assert torch.equal(param.local.reshape(-1), full[start:stop])
    assert start == stop or param.start == start
    assert len(boxes_of(tensor)) > 0 or start == stop
    return holding


def numbered(*shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def one_axis():
    mesh = world_mesh()
    for shape in ((8, 3), (5, 4), (2, 3, 2), (7,), (1, 4)):
        for layout in ("elements", "rows", "whole", "shard"):
            for seed in range(3):
                holding = agrees(placed(numbered(*shape), mesh, layout, random.Random(seed)))
                assert holding.num_ranks == mesh.size()
                assert (holding.cuts[0], holding.cuts[-1]) == (0, torch.Size(shape).numel())
                assert holding.group is not None
        assert agrees(placed(numbered(*shape), mesh, "replicate", None)).group is None


@pytest.mark.parametrize("world_size", [2, 3])
def test_on_one_axis_ranks_hold_what_their_tensors_have(world_size):
    run_ranks(world_size, one_axis)


def two_axes():
    mesh = init_device_mesh("cpu", (2, 2))
    ragged = RaggedShard((0, 1), (1, 5))
    cases: list[tuple[list[Placement], int, int]] = [
        ([Replicate(), RaggedShard((0,), (1, 3))], 1, 24),
        ([Shard(0), ragged], 1, 12),
        ([Shard(0), Shard(0)], 1, 12),
        ([StridedRaggedShard((0, 1), (1, 5), split_factor=2), Shard(0)], 0, 12),
    ]
    for placements, axis, spanned in cases:
        has_ragged = any(isinstance(p, RaggedShard) for p in placements)
        make = distribute_tensor if has_ragged else torch_distribute
        holding = agrees(make(numbered(4, 3, 2), mesh, placements))
        assert holding.axis == axis
        assert holding.cuts[-1] - holding.cuts[0] == spanned


def test_on_two_axes_one_is_exchanged_along_and_the_other_replicates_or_leaves_rows_to_others():
    run_ranks(4, two_axes)


def axes_of_size_one():
    mesh = init_device_mesh("cpu", (2, 1))
    for placements in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Shard(0), Replicate()]):
        weight = torch.nn.Parameter(torch_distribute(numbered(8, 32), mesh, placements))
        assert agrees(weight).axis == 0
        weight.grad = torch.ones_like(weight)
        Muon([weight]).step()
        Shampoo([weight]).step()
        AdamW8bit([weight], min_8bit_numel=1, block=Tile(4, 8)).step()


def test_an_axis_of_size_one_cuts_nothing_for_any_optimizer():
    run_ranks(2, axes_of_size_one)


def refused():
    mesh = world_mesh()
    by_columns = torch_distribute(numbered(4, 6), mesh, [Shard(1)])
    with pytest.raises(
        ValueError, match=r"head: placements .* cut it other than along its rows .* give it to AdamW"
    ):
        _ = Param(by_columns, "head").holding
    assert Param(by_columns, "head").start is None


def test_what_is_not_one_run_is_refused_by_name():
    run_ranks(2, refused)


def test_holders_of_a_range_are_found_with_what_each_has_of_it():
    holding = Holding(None, None, 0, (0, 3, 3, 7, 10))
    assert holding.held(0, 3) == ((0, 3),)
    assert holding.held(2, 8) == ((0, 1), (2, 4), (3, 1))
    assert holding.held(3, 7) == ((2, 4),)
    assert holding.held(5, 5) == ()
    assert holding.own == (0, 3)
