"""A process that destroys its process groups and makes new ones, while models of before are still there."""

from runtime_helpers import seeded, shard
from torch.distributed.device_mesh import init_device_mesh

from ragged_shard.testing import simulated_ranks


def sharded():
    with simulated_ranks(4, rank=1):
        return shard(seeded(), mesh=init_device_mesh("cpu", (4,)), reshard_after_forward=2)


def test_neighbors_are_those_of_the_new_process_groups():
    before = sharded()
    assert sharded() is not before  # and nothing asks for a group of before
