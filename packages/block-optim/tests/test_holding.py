"""Who holds what: one answer for every placement, the same as the tensors' own."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from runs import cut_twice, put
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from block_optim import Param
from block_optim.core.pieces import pieces_of
from ragged_shard import RaggedShard, StridedRaggedShard
from ragged_shard.testing import on_ranks, rank_mesh

hypothesis = pytest.importorskip("hypothesis")
given, settings, st = hypothesis.given, hypothesis.settings, hypothesis.strategies


def agrees(tensor):
    """The holding of a tensor gives this rank the elements that it has; returns the holding."""
    param = Param(tensor, "w")
    holding = param.holding
    full = torch.arange(param.numel, dtype=torch.float32)
    local = param.local.reshape(-1)
    for piece in holding.own:
        assert torch.equal(piece.here(local), piece.of(full))
    assert holding.numel == local.numel()
    if len(holding.own) == 1 and holding.own[0].rows == 1:
        assert param.start == holding.own[0].first
    return holding


def spanned(holding):
    """The elements that the ranks of a holding hold together, each once."""
    held = [
        e
        for rank in range(holding.num_ranks)
        for p in holding.by_rank[rank]
        for row in range(p.rows)
        for e in range(p.first + row * p.stride, p.first + row * p.stride + p.width)
    ]
    assert len(set(held)) == len(held)
    return len(held)


def numbered(*shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


EXPERTS = [[(e * 6, (e + 1) * 6)] for e in range(4)]  # of a tensor (4, 3, 2)


@cut_twice
@on_ranks(4)
def test_on_several_axes_ranks_are_those_of_all_axes_that_cut_what_is_needed_whole():
    mesh = rank_mesh(2, 2)
    ragged = RaggedShard((0, 1), (1, 5))
    strided = StridedRaggedShard((0, 1), (1, 5), split_factor=2)
    # Placements, axes, and those that cut experts.
    cases: list[tuple[list[Placement], tuple[int, ...], tuple[int, ...]]] = [
        ([Replicate(), RaggedShard((0,), (1, 3))], (1,), (1,)),
        ([Shard(0), ragged], (0, 1), (1,)),
        ([Shard(0), Shard(0)], (0, 1), (1,)),
        ([strided, Shard(0)], (0, 1), (0,)),
        ([RaggedShard((0,), (1, 3)), Shard(1)], (0, 1), (0, 1)),
        ([RaggedShard((0,), (1, 3)), Shard(2)], (0, 1), (0, 1)),
        ([Shard(1), Shard(2)], (0, 1), (0, 1)),
    ]
    for placements, axes, needed in cases:
        tensor = put(numbered(4, 3, 2), mesh, placements)
        holding = agrees(tensor)
        assert (holding.axes, spanned(holding)) == (axes, 24)
        assert holding.ranks[holding.rank] == dist.get_rank()
        along = Param(tensor, "w").work_holding(EXPERTS)
        assert along.axes == needed, placements
        assert dist.get_process_group_ranks(along.group) == list(along.ranks)
        ordered = holding.in_order()
        firsts = [min((p.first for p in pieces), default=24) for pieces in ordered.by_rank]
        assert firsts == sorted(firsts)
        assert ordered.own == holding.own
        assert dist.get_process_group_ranks(ordered.group) == list(ordered.ranks)


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
@settings(max_examples=80, deadline=None)
def test_pieces_of_a_box_and_of_a_range_in_it_are_its_elements_in_order(sizes, data):
    offsets = [data.draw(st.integers(0, n - 1)) for n in sizes]
    lengths = [data.draw(st.integers(1, n - o)) for n, o in zip(sizes, offsets, strict=True)]
    full = torch.arange(math.prod(sizes)).view(sizes)
    box = full[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))].reshape(-1)
    pieces = pieces_of([(offsets, lengths)], sizes)
    assert torch.equal(torch.cat([p.of(full.view(-1)).reshape(-1) for p in pieces]), box)
    start = data.draw(st.integers(0, full.numel()))
    stop = data.draw(st.integers(start, full.numel()))
    inside = [part for piece in pieces for part in piece.within(start, stop)]
    wanted = [e for e in box.tolist() if start <= e < stop]
    assert [e for p in inside for e in p.of(full.view(-1)).reshape(-1).tolist()] == wanted
    assert [e for p in inside for e in p.here(box).reshape(-1).tolist()] == wanted


@on_ranks(4)
def test_torchs_strided_shards_are_held_in_the_order_of_their_cuts():
    """FSDP2's own cut of a tensor-parallel parameter is in another order than its ranks."""
    mesh = rank_mesh(2, 2, names=("dp", "tp"))
    for rows in (8, 10, 2):  # even, uneven, and empty on two ranks
        layer = torch.nn.Linear(3, rows, bias=False)
        layer.weight.data.copy_(numbered(rows, 3))
        parallelize_module(layer, mesh["tp"], ColwiseParallel())
        torch_fsdp.fully_shard(layer, mesh=mesh["dp"])
        assert spanned(agrees(layer.weight.detach())) == 3 * rows
