"""Properties over random shapes, prefixes, units with zeros, dtypes and world sizes, on real ranks."""

import itertools
import math

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from ragged_shard import RaggedShard, StridedRaggedShard, distribute_tensor
from ragged_shard.testing import rank_mesh, run_ranks

pytestmark = pytest.mark.long
hypothesis = pytest.importorskip("hypothesis")
HealthCheck, given, settings, st = (
    hypothesis.HealthCheck,
    hypothesis.given,
    hypothesis.settings,
    hypothesis.strategies,
)

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.bool)
RANKS = settings(
    deadline=None, max_examples=150, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)


def content(shape, dtype):
    flat = torch.arange(math.prod(shape)) % 100
    return (flat % 3 == 0 if dtype == torch.bool else flat.to(dtype)).view(shape)


def units_for(draw, prefix_numel, ranks):
    """Shares, zeros among them, whose sum divides the prefix."""
    totals = [d for d in range(1, min(prefix_numel, 12) + 1) if prefix_numel % d == 0] or [1, 2, 3]
    total = draw(st.sampled_from(totals))
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=ranks - 1, max_size=ranks - 1)))
    ends = [0, *cuts, total]
    return tuple(b - a for a, b in itertools.pairwise(ends))


@st.composite
def ragged(draw, shape, ranks):
    k = draw(st.integers(0, len(shape)))
    if k == 0:
        hot = draw(st.integers(0, ranks - 1))
        return RaggedShard((), [int(r == hot) for r in range(ranks)])
    return RaggedShard(tuple(range(k)), units_for(draw, math.prod(shape[:k]), ranks))


@st.composite
def chains(draw):
    """A tensor and the shardings that it passes through, on a 1-D mesh."""
    ranks = draw(st.integers(1, 4))
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 4, 6, 12]), max_size=3)))
    dtype = draw(st.sampled_from(DTYPES))
    others: list = [Replicate()] + [Shard(d) for d in range(len(shape))]
    if dtype != torch.bool:
        others.append(Partial("sum"))
    if dtype.is_floating_point:
        others.append(Partial("avg"))
    steps = draw(st.lists(st.one_of(ragged(shape, ranks), st.sampled_from(others)), min_size=1, max_size=4))
    return shape, dtype, (ranks,), [[draw(ragged(shape, ranks))]] + [[s] for s in steps]


@st.composite
def chains_2d(draw):
    """The same on 2-D meshes, one axis ragged, the other anything that goes with it."""
    ranks, others = draw(st.sampled_from([(2, 2), (1, 3), (3, 1), (4, 1), (1, 4), (1, 2), (2, 1)]))
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 4, 6, 12]), min_size=1, max_size=3)))
    dtype = draw(st.sampled_from(DTYPES))
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        placement = draw(ragged(shape, ranks))
        k = len(placement.dims)
        beside: list = [Replicate()] + [Shard(d) for d in range(k, len(shape))]
        if dtype != torch.bool:
            beside.append(Partial("sum"))
        kind = draw(st.sampled_from(["ragged", "ragged", "strided", "torch"]))
        if kind == "strided" and others > 1 and k and shape[0] % others == 0:
            part = math.prod(shape[:k]) // others
            strided = StridedRaggedShard(placement.dims, units_for(draw, part, ranks), others)
            steps.append([strided, Shard(0)])
        elif kind == "torch":
            plain = st.sampled_from([Replicate()] + [Shard(d) for d in range(len(shape))])
            steps.append([draw(plain), draw(plain)])
        else:
            steps.append([placement, draw(st.sampled_from(beside))])
    first = draw(ragged(shape, ranks))
    return shape, dtype, (ranks, others), [[first, Replicate()], *steps]


def follow(shape, dtype, mesh_shape, steps):
    mesh = rank_mesh(*mesh_shape)
    full = content(shape, dtype)
    start = distribute_tensor(full, mesh, steps[0])
    tensor = start
    assert torch.equal(start.full_tensor(), full)
    for placements in steps[1:]:
        tensor = tensor.redistribute(placements=placements)
        assert tensor.dtype == dtype
        assert torch.equal(tensor.full_tensor(), full), placements
        back = tensor.redistribute(placements=steps[0])
        assert torch.equal(back.to_local(), start.to_local()), placements
    direct = start.redistribute(placements=steps[-1])
    if not any(isinstance(p, Partial) for p in steps[-1]):
        assert torch.equal(direct.to_local(), tensor.to_local())


@settings(RANKS, max_examples=200)
@given(st.one_of(chains(), chains(), chains_2d()))
def test_any_chain_of_redistributions_ends_where_a_direct_one_does(case):
    run_ranks(math.prod(case[2]), follow, *case)


def arithmetic(shape, dtype, mesh_shape, steps):
    mesh = rank_mesh(*mesh_shape)
    x = content(shape, dtype)
    tensor = distribute_tensor(x, mesh, steps[0], src_data_rank=None)
    assert torch.equal((tensor * tensor).full_tensor(), x * x)
    assert torch.equal((tensor == tensor.clone()).full_tensor(), x == x)
    assert torch.equal(tensor.to(torch.float64).full_tensor(), x.to(torch.float64))
    assert tensor.to(torch.float64).sum().item() == x.to(torch.float64).sum().item()
    assert tensor.any().item() == x.any().item()
    assert tensor.all().item() == x.all().item()
    if x.numel():
        assert tensor.max().item() == x.max().item()
        assert tensor.min().item() == x.min().item()
    for dim in range(x.ndim):
        got = tensor.to(torch.float32).sum(dim).full_tensor()
        assert torch.equal(got, x.to(torch.float32).sum(dim))


@RANKS
@given(chains())
def test_ops_and_reductions_of_any_ragged_tensor_are_those_of_the_unsharded_tensor(case):
    run_ranks(math.prod(case[2]), arithmetic, *case)
