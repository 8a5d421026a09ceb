"""Simulated ranks: the right bytes in the right memory, and nothing sent."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from ragged_shard import RaggedShard, distribute_tensor
from ragged_shard.testing import Network, rank_mesh, simulated_ranks


def gather(shard, ranks):
    gathered = torch.empty(ranks * len(shard))
    (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(gathered, shard)
    return gathered


def reduce_scatter(full, ranks, op=dist.ReduceOp.SUM):
    shard = torch.empty(len(full) // ranks)
    (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(shard, full, op=op)
    return shard


def test_this_process_is_one_rank_of_many_on_any_mesh():
    with simulated_ranks(6, rank=4):
        mesh = rank_mesh(2, 3, names=("replicate", "shard"))
        assert (dist.get_rank(), dist.get_world_size()) == (4, 6)
        assert tuple(mesh.get_coordinate() or ()) == (1, 1)
        assert mesh["shard"].get_group().size() == 3
    assert not dist.is_initialized()


def test_every_other_rank_holds_what_this_one_holds():
    with simulated_ranks(3, rank=1):
        assert gather(torch.tensor([1.0, 2.0]), 3).tolist() == [1, 2] * 3
        full = torch.arange(6.0)
        assert reduce_scatter(full, 3).tolist() == [6, 9]  # this rank's slice, three times
        assert reduce_scatter(full, 3, dist.ReduceOp.AVG).tolist() == [2, 3]
        summed = torch.ones(2)
        dist.all_reduce(summed)
        assert summed.tolist() == [3, 3]
        dist.all_reduce(summed, op=dist.ReduceOp.MAX)
        dist.broadcast(summed, src=0)
        assert summed.tolist() == [3, 3]
        received = torch.empty(5)
        dist.all_to_all_single(received, torch.tensor([1.0, 2.0]), [2, 1, 2], [1, 0, 1])
        assert received.tolist() == [1, 2, 1, 2, 1]


def test_bytes_received_are_those_of_the_collectives():
    with simulated_ranks(4, rank=2) as simulation:
        gather(torch.ones(10), 4)
        assert simulation.received == 3 * 40
        reduce_scatter(torch.ones(40), 4)
        assert simulation.received == 3 * 40 + 3 * 40
        dist.all_reduce(torch.ones(40))
        assert simulation.received == 6 * 40 + 2 * 3 * 40
        dist.broadcast(torch.ones(10), src=2)
        assert simulation.received == 12 * 40


def test_an_equal_mesh_of_a_later_world_uses_its_own_groups():
    """Groups are known by name, and torch remembers what follows for equal meshes, with the mesh that it saw first."""
    for groups_before in (30, 0):
        with simulated_ranks(4):
            for _ in range(groups_before):
                dist.new_group([0, 1])
            mesh = rank_mesh(2, 2, names=("a", "b"))
            sharded = DTensor.from_local(torch.ones(3, 5), mesh, [Shard(0), Shard(1)])
            summed: Any = sharded.sum(0)
            assert summed.full_tensor().tolist() == [6.0] * 10


def test_distributed_tensors_work_on_simulated_ranks():
    with simulated_ranks(4):
        mesh = rank_mesh(4)
        theirs = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
        assert theirs.full_tensor().equal(torch.ones(8, 3))
        total: Any = theirs.sum()
        assert total.full_tensor() == 24
        ours = distribute_tensor(torch.ones(8, 3), mesh, [RaggedShard((0,), (1, 1, 1, 1))])
        assert ours.full_tensor().equal(torch.ones(8, 3))


def test_collectives_can_be_skipped():
    with simulated_ranks(2, collectives="skip") as simulation:
        values = torch.ones(3)
        dist.all_reduce(values)
        assert values.equal(torch.ones(3))
        assert simulation.received == 12


def test_meta_tensors_take_part():
    with simulated_ranks(2):
        full = distribute_tensor(torch.empty(4, 2, device="meta"), rank_mesh(2), [RaggedShard((0,), (3, 1))])
        assert full.to_local().shape == (3, 2)
        tensor = torch.empty(4, device="meta")
        dist.all_reduce(tensor)
        assert tensor.is_meta


def test_a_network_takes_latency_and_bytes_over_bandwidth():
    assert Network(bandwidth=100.0, latency=2.0).seconds(50) == 2.5
    assert Network(latency=2.0).seconds(50) == 0


def test_bad_arguments_unknown_reductions_and_ranks_within_ranks_are_refused():
    bad: tuple[dict[str, Any], ...] = ({"rank": 2}, {"rank": -1}, {"collectives": "guess"})
    for options in bad:
        with pytest.raises(ValueError, match="a rank below the world size"), simulated_ranks(2, **options):
            pytest.fail(f"{options}")
    with simulated_ranks(2):
        with pytest.raises(NotImplementedError, match="SUM, AVG"):
            dist.all_reduce(torch.ones(1), op=dist.ReduceOp.PRODUCT)
        with pytest.raises(RuntimeError, match="has done already"), simulated_ranks(2):
            pass


def test_a_failure_inside_leaves_nothing_behind():
    with pytest.raises(KeyError), simulated_ranks(2):
        raise KeyError
    with simulated_ranks(3):
        assert dist.get_world_size() == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_collectives_run_on_a_stream_of_their_own_for_the_time_that_the_network_needs():
    with simulated_ranks(2, network=Network(bandwidth=1e6, latency=0.01)) as simulation:
        shard, gathered = torch.ones(10_000, device="cuda"), torch.empty(20_000, device="cuda")
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather_single(gathered, shard)  # measures the device's clock
        torch.cuda.synchronize()
        start.record()
        work = gather_single(gathered, shard, async_op=True)
        assert not work.is_completed()
        work.wait()
        end.record()
        torch.cuda.synchronize()
        assert work.is_completed()
        assert gathered.eq(1).all()
        assert simulation.received == 80_000
        assert 0.9 * 50 < start.elapsed_time(end) < 1.5 * 50 + 20
