import itertools
import random
from dataclasses import replace

import pytest
from runs import held_runs

from block_optim.core.assign import Job, assign, digest, loads, lower_bound, moved
from block_optim.muon.assignment import AssignedMatrix, Assignment, assign_domain
from block_optim.muon.matrices import Matrix, matrices_of

hypothesis = pytest.importorskip("hypothesis")
given, settings, st = hypothesis.given, hypothesis.settings, hypothesis.strategies

jobs_of = st.lists(st.integers(1, 30), min_size=1, max_size=8)


def spread(flops, num_ranks, rng):
    """A job cut over at least two ranks."""
    first = rng.randrange(num_ranks - 1)
    last = rng.randrange(first + 1, num_ranks)
    return Job(flops, flops, tuple((rank, rng.randint(1, 9)) for rank in range(first, last + 1)))


def least_possible(jobs, num_ranks):
    choices = itertools.product(range(num_ranks), repeat=len(jobs))
    fits = (c for c in choices if all(j.holder in (None, owner) for j, owner in zip(jobs, c, strict=True)))
    return min(max(loads(jobs, c, num_ranks)) for c in fits)


@given(jobs_of, st.integers(2, 3), st.integers(0, 2**32))
@settings(max_examples=80, deadline=None)
def test_the_largest_load_is_within_four_thirds_of_the_least_possible(flops, num_ranks, seed):
    rng = random.Random(seed)
    jobs = [spread(f, num_ranks, rng) for f in flops]
    owners = assign(jobs, num_ranks)
    assert 3 * max(loads(jobs, owners, num_ranks)) <= 4 * least_possible(jobs, num_ranks)


@given(jobs_of, st.integers(2, 3), st.integers(0, 2**32))
@settings(max_examples=80, deadline=None)
def test_whole_matrices_stay_and_the_rest_is_spread_around_them(flops, num_ranks, seed):
    rng = random.Random(seed)
    whole = [Job(f, f, ((rng.randrange(num_ranks), 9),)) for f in flops[::2]]
    jobs = whole + [spread(f, num_ranks, rng) for f in flops[1::2]]
    owners = assign(jobs, num_ranks)
    assert owners[: len(whole)] == tuple(job.holder for job in whole)
    assert 2 * max(loads(jobs, owners, num_ranks)) <= 3 * least_possible(jobs, num_ranks)
    assert lower_bound(jobs, num_ranks) <= least_possible(jobs, num_ranks)


def test_affinity_moves_fewer_bytes_than_loads_alone_and_costs_little_balance():
    rng = random.Random(0)
    jobs = [spread(f, 8, rng) for f in [100] * 30 + [60] * 40 + [10] * 50]
    near, blind = assign(jobs, 8), assign([Job(j.flops, j.nbytes, ((0, 1), (1, 1))) for j in jobs], 8)
    assert moved(jobs, near) < 0.8 * moved(jobs, blind)
    assert max(loads(jobs, near, 8)) <= 1.1 * max(loads(jobs, blind, 8))


def test_among_equally_good_ranks_the_holder_of_most_gets_the_matrix():
    jobs = [Job(10, 10, ((0, 1), (1, 9))), Job(10, 10, ((0, 9), (1, 1)))]
    assert assign(jobs, 2) == (1, 0)


def test_equal_flops_are_told_apart_by_bytes():
    even = tuple((r, 1) for r in range(2))
    jobs = [Job(10, 1, even), Job(10, 9, even), Job(10, 8, even), Job(10, 2, even)]
    owners = assign(jobs, 2)
    assert owners[1] != owners[2]
    assert loads(jobs, owners, 2) == [20, 20]


@given(jobs_of, st.integers(2, 4), st.integers(0, 2**32))
@settings(max_examples=80, deadline=None)
def test_jobs_that_must_stay_among_their_holders_do_and_earlier_loads_count(flops, num_ranks, seed):
    rng = random.Random(seed)
    jobs = [replace(spread(f, num_ranks, rng), among_holders=True) for f in flops]
    before = [rng.randint(0, 40) for _ in range(num_ranks)]
    owners = assign(jobs, num_ranks, before)
    assert all(owner in dict(job.holders) for job, owner in zip(jobs, owners, strict=True))
    found = loads(jobs, owners, num_ranks, before)
    assert sum(found) == sum(before) + sum(flops)
    assert max(found) >= lower_bound(jobs, num_ranks, before)


def test_a_loaded_rank_gets_less():
    jobs = [Job(10, 10, ((0, 5), (1, 5)), among_holders=True)] * 2
    assert assign(jobs, 2) in ((0, 1), (1, 0))
    assert assign(jobs, 2, [100, 0]) == (1, 1)


def even_cuts(numel, num_ranks):
    return tuple(numel * rank // num_ranks for rank in range(num_ranks + 1))


def llama_8b(num_ranks):
    shapes = [
        (4096, 4096),
        (1024, 4096),
        (1024, 4096),
        (4096, 4096),
        (14336, 4096),
        (14336, 4096),
        (4096, 14336),
    ]
    found = []
    for i, (rows, columns) in enumerate(shapes * 32):
        (matrix,) = matrices_of("w", (rows, columns), "auto")
        holding = held_runs(even_cuts(rows * columns, num_ranks))
        flops = 5 * min(rows, columns) ** 2 * (4 * max(rows, columns) + 2 * min(rows, columns))
        found.append(
            AssignedMatrix(f"layer{i // 7}.{i % 7}", i, 0, matrix, holding.holders(*matrix.ranges), flops)
        )
    return found


@pytest.mark.parametrize(("num_ranks", "most"), [(64, 1.10), (128, 1.15)])
def test_a_model_of_8b_is_balanced_within_four_thirds_of_the_bound(num_ranks, most):
    found = assign_domain(llama_8b(num_ranks), num_ranks, 32 << 20)
    assert max(found.loads) * 3 <= 4 * found.bound
    assert found.imbalance <= most
    in_buckets = [
        sum(m.nbytes for m in found.matrices if m.owner == 3 and m.bucket == b)
        for b in range(found.num_buckets)
    ]
    assert max(in_buckets) <= max(32 << 20, 14336 * 4096 * 2)


def test_an_assignment_is_a_value_and_its_fingerprint_tells_others_apart():
    a, b = (assign_domain(llama_8b(4), 4, 32 << 20) for _ in range(2))
    assert a == b
    assert a.fingerprint == b.fingerprint == digest(4, a.num_buckets, a.matrices)
    assert a.fingerprint != assign_domain(llama_8b(4)[:-1], 4, 32 << 20).fingerprint
    assert 0 <= a.fingerprint < 2**62


def test_an_assignment_prints_owner_bytes_flops_and_imbalance_and_as_many_lines_as_are_asked_for():
    matrix = Matrix(4, 6, ((0, 24),))
    holding = held_runs((0, 18, 24))
    matrices = [AssignedMatrix("blocks.0.wq", 0, 0, matrix, holding.holders(*matrix.ranges), 2000)]
    text = str(Assignment((assign_domain(matrices, 2, 100),)))
    assert text.splitlines() == [
        "Muon assignment",
        "1 matrices, 2 ranks, 1 bucket: 2.00 kFLOP a step, imbalance 2.000, 24 B moved a step",
        "    rank  matrices      FLOP   owned B  received B",
        "       0         1    2.00 k       48          12 ",
        "       1         0        0         0           0 ",
        "  matrix               shape  bucket  owner  holds      FLOP   moved B",
        "  blocks.0.wq            4x6       0      0    75%    2.00 k       24 ",
    ]
    long = assign_domain(llama_8b(64), 64, 32 << 20).describe(10)
    assert "... and 54 more ranks" in long
    assert "... and 214 more matrices" in long


# ------------------------------------------------------------------ matrices of a tensor


@pytest.mark.parametrize(
    ("shape", "how", "sizes"),
    [
        ((6, 4), "auto", [(6, 4)]),
        ((3, 6, 4), "auto", [(6, 4)] * 3),
        ((2, 3, 6, 4), "auto", [(2, 72)]),
        ((2, 3, 6, 4), "stack", [(6, 4)] * 6),
        ((3, 6, 4), "flatten", [(3, 24)]),
        ((6, 4), "heads:3", [(2, 4)] * 3),
        ((6, 4), "rows:4,1,1", [(4, 4), (1, 4), (1, 4)]),
        ((2, 6, 4), "rows:4,1,1", [(4, 4), (1, 4), (1, 4)] * 2),
        ((12, 4), "rows:4,1,1*2", [(8, 4), (2, 4), (2, 4)]),
        ((0, 4), "auto", []),
    ],
)
def test_a_tensor_is_cut_into_matrices_that_cover_it_once(shape, how, sizes):
    found = matrices_of("w", shape, how)
    assert [(m.rows, m.columns) for m in found] == sizes
    elements = [e for m in found for ends in m.ranges for e in range(*ends)]
    numel = 1
    for size in shape:
        numel *= size
    assert sorted(elements) == list(range(numel))
    assert all(sum(b - a for a, b in m.ranges) == m.numel for m in found)


def test_interleaved_rows_are_gathered_group_by_group():
    q, k, v = matrices_of("qkv", (12, 1), "rows:4,1,1*2")
    assert q.ranges == ((0, 4), (6, 10))
    assert k.ranges == ((4, 5), (10, 11))
    assert v.ranges == ((5, 6), (11, 12))


@pytest.mark.parametrize(
    ("shape", "how", "message"),
    [
        ((5,), "auto", r"blocks.0.norm: shape \(5,\) is not a matrix"),
        ((6, 4), "heads:4", "blocks.0.norm: .* 6 rows do not divide into 4 heads"),
        ((6, 4), "rows:4,1", "are 5 rows, the tensor has 6"),
        ((6, 4), "columns:2", "is not known"),
        ((6, 4), "heads:0", "is not known"),
    ],
)
def test_a_view_that_does_not_fit_is_refused_by_name(shape, how, message):
    with pytest.raises(ValueError, match=message):
        matrices_of("blocks.0.norm", shape, how)
