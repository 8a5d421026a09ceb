"""Muon on real ranks: the same bits wherever matrices are cut, and the bytes that it announces."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runs import MATRICES, STACKS, Allocations, Run, SmallBuckets, full, put, same, tensors, world_mesh
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from block_optim import Muon
from ragged_shard import RaggedShard
from ragged_shard.testing import on_ranks, record_collectives, run_ranks


def trained(layout="plain", mesh_shape=(), shapes=MATRICES + STACKS, **options):
    return Run(Muon, layout, mesh_shape, shapes=shapes, lr=0.02, **options).steps(0, 2).result()


@on_ranks(4)
def test_fused_rows_and_replicated_meshes_give_the_same_bits():
    """Per-head and fused views cut anywhere, and two-axis meshes."""
    options = {"shapes": ((24, 6), (24, 10)), "matrices": (12, 6, 6)}
    expected = trained(**options)
    for layout in ("elements", "rows", "shard"):
        same(trained(layout, **options), expected)
        same(trained(layout, (2, 2), **options), expected)


def counted(layout):
    shapes = MATRICES + STACKS
    run = Run(SmallBuckets, layout, shapes=shapes, lr=0.1, skip_nonfinite=False).steps(0, 1)
    with record_collectives() as record, Allocations() as spy:
        run.optimizer.step()
    exchanged = [event for event in record.events if event.kind == "all_to_all"]
    other = [event.kind for event in record.events if event.kind != "all_to_all"]
    (assignment,) = run.optimizer.assignment.domains
    mine = sum(
        2 * count
        for m in assignment.matrices
        for rank, count in m.holders
        if rank != m.owner and dist.get_rank() in (rank, m.owner)
    )
    return sum(e.bytes_sent for e in exchanged), mine, assignment, len(exchanged), other, spy.found


@pytest.mark.parametrize("layout", ["elements", "rows", "shard"])
def test_bytes_are_twice_what_owners_do_not_hold_and_nothing_is_allocated(layout):
    results = run_ranks(3, counted, layout)
    assignment = results[0][2]
    assert all(r[2] == assignment for r in results)
    assert (
        sum(r[0] for r in results)
        == assignment.bytes_moved
        == 2 * 2 * sum(m.moved for m in assignment.matrices)
    )
    assert sum(m.moved for m in assignment.matrices) == sum(
        m.matrix.numel - dict(m.holders).get(m.owner, 0) for m in assignment.matrices
    )
    assert assignment.bytes_moved > 0
    for sent, mine, _, calls, other, allocated in results:
        assert sent == mine
        assert calls <= 2 * assignment.num_buckets
        assert other == ["all_reduce"]  # one byte for each parameter: has anyone a gradient
        assert allocated == []


def test_whole_matrices_are_computed_where_they_are_and_no_collective_is_issued():
    for sent, _, assignment, calls, other, _ in run_ranks(3, counted, "whole"):
        assert (sent, calls, other) == (0, 0, [])
        assert assignment.bytes_moved == 0


@on_ranks(3)
def test_whole_matrices_need_gradients_only_where_they_are():
    """In one bucket: a matrix that is cut and has no gradient, and whole ones, with gradients at their holders only."""
    mesh, rank = world_mesh(), dist.get_rank()
    weights, grads = tensors(((8, 6), (8, 6), (8, 6)), 0), tensors(((8, 6), (8, 6), (8, 6)), 1)
    placements: list[Any] = [Shard(0), RaggedShard((0,), (1, 0, 0)), RaggedShard((0,), (0, 1, 0))]
    params = [torch.nn.Parameter(put(w, mesh, [p])) for w, p in zip(weights, placements, strict=True)]
    for i in (1, 2):
        value = put(grads[i], mesh, [placements[i]])
        params[i].grad = value if rank == i - 1 else None
    optimizer = Muon(params, lr=0.1)
    assert optimizer.assignment.domains[0].num_buckets == 1
    optimizer.step()
    found = [full(p.detach()) for p in params]
    assert torch.equal(found[0], weights[0])
    for i in (1, 2):
        twin = torch.nn.Parameter(weights[i].clone())
        twin.grad = grads[i]
        torch.optim.Muon([twin], lr=0.1).step()
        assert torch.equal(found[i], twin.detach())


class OneMatrix(Muon):
    """Muon with one matrix of 8 x 8 an owner in a bucket."""

    bucket_bytes = 8 * 8 * 2


class Ops(TorchDispatchMode):
    """The order of exchanges and of matrix products."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.seen += [kind for kind in ("alltoall", "mm") if kind in name]
        return func(*args, **(kwargs or {}))


@on_ranks(3)
def test_the_next_buckets_transfer_starts_before_this_ones_newton_schulz():
    run = Run(OneMatrix, "shard", shapes=[(8, 8)] * 12, skip_nonfinite=False)
    run.give(0)
    with Ops() as ops:
        run.optimizer.step()
    exchanges = [len(list(run)) for kind, run in itertools.groupby(ops.seen) if kind == "alltoall"]
    # Of four buckets: one there, and one back with the next but one there.
    assert exchanges == [2, 2, 2, 1, 1]
