"""Layouts that cut nothing, or that leave a tensor whole on one rank: every optimizer takes them."""

import logging

import torch
from runs import same
from test_presence import KINDS, Run
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute

from ragged_shard import RaggedShard, distribute_tensor
from ragged_shard.testing import on_ranks, rank_mesh

SHAPES = ((24, 16), (13, 8), (3, 8, 6))


def layouts(world, dims):
    """Meshes and placements; the second axis has one rank, or all of them."""
    every = tuple(range(dims))
    one_hot = [0] * (world - 1) + [1]
    return {
        "replicate": ((world,), [Replicate()]),
        "whole rows on one rank": ((world,), [RaggedShard((0,), one_hot)]),
        "whole elements on one rank": ((world,), [RaggedShard(every, one_hot)]),
        "replicated, ragged over one": ((world, 1), [Replicate(), RaggedShard(every, (1,))]),
        "replicated, columns over one": ((world, 1), [Replicate(), Shard(1)]),
        "one, whole on one rank": ((1, world), [Shard(1), RaggedShard(every, one_hot)]),
        "one ragged, replicated": ((1, world), [RaggedShard((0,), (1,)), Replicate()]),
    }


class Placed(Run):
    def put(self, values):
        if self.layout == "plain":
            return super().put(values)
        found = []
        for value in values:
            shape, placements = layouts(torch.distributed.get_world_size(), value.ndim)[self.layout]
            mesh = rank_mesh(*shape)
            ragged = any(isinstance(p, RaggedShard) for p in placements)
            make = distribute_tensor if ragged else torch_distribute
            found.append(make(value, mesh, placements, src_data_rank=None))
        return found


def trained(name, layout="plain"):
    kind, options = KINDS[name]
    return Placed(kind, layout, shapes=SHAPES, lr=0.1, **options).steps(0, 3).result()


@on_ranks(2)
def test_every_optimizer_takes_a_layout_that_cuts_nothing():
    logging.getLogger("block_optim").setLevel(logging.ERROR)
    failed = []
    for name in KINDS:
        expected = trained(name)
        for layout in layouts(2, 2):
            try:
                same(trained(name, layout), expected)
            except (ValueError, AssertionError, RuntimeError) as error:
                failed.append(f"{name}, {layout}: {error!r}")
    assert not failed, "\n".join(failed)
