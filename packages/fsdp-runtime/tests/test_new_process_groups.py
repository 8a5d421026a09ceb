"""A process that destroys its process groups and makes new ones, while models of before are still there."""

import torch
from runtime_helpers import loss_of, seeded, shard, tokens
from torch.distributed.device_mesh import init_device_mesh

from ragged_shard.testing import on_ranks, rank_mesh, simulated_ranks


def sharded():
    with simulated_ranks(4, rank=1):
        return shard(seeded(), mesh=init_device_mesh("cpu", (4,)), reshard_after_forward=2)


def test_neighbors_are_those_of_the_new_process_groups():
    before = sharded()
    assert sharded() is not before  # and nothing asks for a group of before


@on_ranks(8)
def test_ranks_next_to_tensor_parallelism_have_neighbors_of_their_own():
    """Only the ranks of one column of a mesh are in its sub-mesh: a group that all ranks must make would hang."""
    mesh = rank_mesh(4, 2, names=("data", "tensor"))["data"]
    model, alone = shard(seeded(), mesh=mesh, reshard_after_forward=2), seeded()
    rank = mesh.get_local_rank()
    loss_of(model, tokens(0, rank=rank)).backward()
    for number in range(4):
        (loss_of(alone, tokens(0, rank=number)) / 4).backward()
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-5, atol=1e-6, msg=name)
