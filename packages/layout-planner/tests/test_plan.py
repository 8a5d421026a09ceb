"""Every plan is sound, whatever the input; bad input is refused by name."""

import math
import os
import random
import subprocess
import sys

import pytest

from layout_planner import Elements, Layout, Rows, Segment, TensorSpec, Tile, Whole, parse_block, plan

from .slow_checker import blocks_of, check

hypothesis = pytest.importorskip("hypothesis")
HealthCheck, given, settings, st = (
    hypothesis.HealthCheck,
    hypothesis.given,
    hypothesis.settings,
    hypothesis.strategies,
)

PRIMES = [2, 3, 5, 7, 11, 13, 31, 97, 127, 257]
SIZES = st.one_of(st.integers(1, 40), st.sampled_from(PRIMES))
BLOCKS = st.one_of(
    st.builds(Rows, SIZES),
    st.builds(Elements, st.integers(1, 300)),
    st.builds(Tile, SIZES, SIZES),
    st.just(Whole()),
)


@st.composite
def tensors(draw, name):
    shape = tuple(
        draw(st.lists(SIZES, min_size=0, max_size=3).filter(lambda dims: math.prod(dims) <= 20_000))
    )
    block = draw(BLOCKS)
    if isinstance(block, Tile) and len(shape) < 2:
        block = Rows(block.rows)
    return TensorSpec(name, shape, block)


@st.composite
def groups(draw):
    return [draw(tensors(f"t{index}")) for index in range(draw(st.integers(1, 9)))]


WORLD_SIZES = st.one_of(st.integers(1, 16), st.sampled_from([31, 64, 97, 256, 1000, 1024, 4096]))


@pytest.mark.parametrize("examples", [80, pytest.param(600, marks=pytest.mark.long)])
def test_any_plan_is_contiguous_aligned_equal_and_cuts_no_block(examples):
    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(groups(), WORLD_SIZES, st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([0, 64, 1 << 19]))
    def each(group, world_size, align, segment_cost):
        layout = plan(group, world_size, align=align, segment_cost=segment_cost)
        check(layout)
        assert Layout.from_json(layout.to_json()) == layout

    each()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(tensors("t"))
def test_a_block_grid_is_the_ends_of_the_blocks(spec):
    blocks = blocks_of(spec.shape, str(spec.block))
    cuts = {0} | {stop for _, stop in blocks}
    probes = range(spec.numel + 1) if spec.numel < 500 else [*range(0, spec.numel + 1, 37), *sorted(cuts)]
    assert all(spec.grid.is_cut(offset) == (offset in cuts) for offset in probes)
    assert spec.grid.num_blocks == len(blocks)


def test_more_segments_never_pad_more_than_one_plus_their_cost():
    rng = random.Random(1)
    for _ in range(60):
        group = [
            TensorSpec(
                f"t{index}",
                (rng.choice([96, 120, 1024]), rng.choice([33, 64, 80])),
                Rows(rng.choice([1, 5, 8])),
            )
            for index in range(rng.randint(2, 6))
        ]
        world_size = rng.choice([4, 16, 64])
        one = plan(group, world_size, max_segments=1)
        several = plan(group, world_size, segment_cost=100)
        extra = 100 * (len(several.segments) - 1)
        assert several.padded_numel + extra <= one.padded_numel
        assert len(several.segments) <= 4


def test_blocks_without_a_small_common_multiple_get_segments_of_their_own():
    group = [
        TensorSpec("a", (1024, 127), Rows(1)),
        TensorSpec("b", (1024, 131), Rows(1)),
        TensorSpec("c", (64,)),
    ]
    layout = plan(group, 64, align=1, segment_cost=16)
    assert len(layout.segments) > 1
    assert layout.padding_ratio < 0.001
    assert plan(group, 64, align=1, max_segments=1).padding_ratio > 0.5


def test_the_given_order_is_kept_where_it_is_as_good():
    group = [TensorSpec(name, (64, 32)) for name in ("d", "a", "c", "b")]
    layout = plan(group, 4)
    assert layout.segments == (Segment(2048, ("d", "a", "c", "b"), (0, 2048, 4096, 6144)),)


def test_an_order_that_fits_is_found_where_the_given_one_does_not():
    group = [TensorSpec(f"t{index}", (size,), Whole()) for index, size in enumerate([6, 6, 4, 4, 2, 2])]
    layout = plan(group, 2, align=1)
    assert layout.segments[0].shard_size == 12
    assert layout.gap == 0


def test_units_and_dims_are_what_a_ragged_placement_takes():
    layout = plan([TensorSpec("w", (6, 5), Rows(2)), TensorSpec("scale", ())], 2, align=1)
    assert layout.local_dims("w") == (0,)
    assert layout.local_units("w") == (2, 1)
    assert layout.local_dims("scale") == ()
    assert layout.local_units("scale") == (0, 1)
    experts = plan([TensorSpec("e", (2, 4, 3), Rows(1))], 4, align=1)
    assert experts.local_dims("e") == (0, 1)
    assert experts.local_units("e") == (1, 1, 1, 1)
    assert plan([TensorSpec("e", (2, 6), Elements(4))], 3, align=1).local_dims("e") == (0, 1)


def test_more_ranks_than_blocks_leaves_ranks_empty_but_shards_equal():
    layout = plan([TensorSpec("w", (3, 16), Rows(1))], 8)
    assert layout.segments[0].shard_size == 16
    assert [layout.local_range("w", rank) for rank in (0, 2, 3, 7)] == [(0, 16), (32, 48), (48, 48), (48, 48)]


def test_one_rank_holds_everything_without_padding_beyond_alignment():
    layout = plan([TensorSpec("a", (7,)), TensorSpec("b", (5, 3), Whole())], 1)
    assert layout.padded_numel == 24
    assert layout.local_units("a") == (1,)


def test_the_lower_bound_knows_that_ranks_hold_whole_blocks():
    layout = plan([TensorSpec("w", (3, 100), Whole()), TensorSpec("v", (2, 100), Whole())], 4, align=1)
    assert (layout.lower_bound, layout.bound.reason) == (1200, "blocks")
    assert layout.gap == 0


def test_the_lower_bound_knows_that_long_tensors_force_their_grid():
    group = [TensorSpec("a", (630, 10), Rows(1)), TensorSpec("b", (900, 7), Rows(1))]
    layout = plan(group, 9, align=1, segment_cost=0)
    assert layout.gap == 0
    layout = plan(
        [TensorSpec("a", (640, 10), Rows(1)), TensorSpec("b", (640, 7), Rows(1))], 9, align=1, segment_cost=0
    )
    assert layout.bound.reason == "grids"
    assert layout.lower_bound > layout.numel + 9


SCRIPT = """
from layout_planner import Rows, TensorSpec, plan
group = [TensorSpec(f"t{i}", (64 + 37 * i, 96), Rows(1 + i % 5)) for i in range(12)]
print([plan(group, world_size, segment_cost=1000).fingerprint() for world_size in (3, 64, 1000)])
"""


def test_processes_with_other_hash_seeds_find_the_same_fingerprint():
    seen = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(seen) == 1


def test_fingerprints_tell_layouts_apart():
    group = [TensorSpec("a", (64, 8)), TensorSpec("b", (32, 8))]
    found = {
        plan(group, 2).fingerprint(),
        plan(group, 4).fingerprint(),
        plan(group[::-1], 2).fingerprint(),
        plan([group[0], TensorSpec("b", (32, 8), Rows(2))], 2).fingerprint(),
        plan(group, 2, align=16).fingerprint(),
    }
    assert len(found) == 5


def test_blocks_read_back_what_they_print():
    for block in (Rows(3), Elements(7), Tile(2, 5), Whole()):
        assert parse_block(str(block)) == block
