"""How well plans pack: near the lower bound, below the baselines, quantized blocks too."""

import math
import random

import pytest

from layout_planner import Block, Elements, Rows, TensorSpec, Tile, Whole, plan
from layout_planner.baselines import even_rows, in_given_order, lcm_rule

from .slow_checker import check, least_shard

INSTANCES = 500


def small_instance(seed):
    """Up to 6 tensors of up to 72 elements with mixed blocks, 1 to 8 ranks."""
    rng = random.Random(seed)
    tensors = []
    for index in range(rng.randint(1, 6)):
        shape = tuple(rng.randint(1, 6) for _ in range(rng.choice((1, 2, 2, 3))))
        if len(shape) < 3 and rng.random() < 0.5:
            shape = (shape[0] * rng.randint(1, 4), *shape[1:])
        blocks: list[Block] = [Rows(rng.randint(1, 4)), Elements(rng.randint(1, 9)), Whole()]
        if len(shape) > 1:
            blocks.append(Tile(rng.randint(1, 3), 2))
        tensors.append(TensorSpec(f"t{index}", shape, rng.choice(blocks)))
    return tensors, rng.randint(1, 8), rng.choice((1, 1, 2, 4))


def test_at_least_95_per_cent_of_small_instances_are_packed_optimally(record_property):
    ratios = []
    for seed in range(INSTANCES):
        tensors, world_size, align = small_instance(seed)
        layout = plan(tensors, world_size, align=align, max_segments=1)
        check(layout)
        best = least_shard(tensors, world_size, align)
        assert layout.lower_bound <= best * world_size, f"seed {seed}: the bound is above the optimum"
        assert layout.segments[0].shard_size >= best
        ratios.append(layout.segments[0].shard_size / best)
    optimal = sum(ratio == 1 for ratio in ratios) / len(ratios)
    record_property("optimal", optimal)
    record_property("worst_ratio", max(ratios))
    print(f"optimal: {optimal:.1%} of {len(ratios)}, worst ratio {max(ratios):.3f}")
    assert optimal >= 0.95
    assert max(ratios) < 1.35


def test_no_split_into_segments_beats_the_lower_bound():
    tightest = []
    for seed in range(150):
        tensors, world_size, align = small_instance(1000 + seed)
        tensors = tensors[:4]
        layout = plan(tensors, world_size, align=align, segment_cost=0)
        check(layout)
        best = min(
            sum(least_shard(part, world_size, align) for part in parts) for parts in splits_of(tensors)
        )
        assert layout.lower_bound <= best * world_size <= layout.padded_numel, f"seed {seed}"
        tightest.append(layout.lower_bound == best * world_size)
    assert sum(tightest) > 100


def splits_of(tensors):
    """All ways to put the tensors in segments."""
    if not tensors:
        return [[]]
    first, *rest = tensors
    found = []
    for parts in splits_of(rest):
        found.append([[first], *parts])
        found += [[*parts[:at], [first, *part], *parts[at + 1 :]] for at, part in enumerate(parts)]
    return found


hypothesis = pytest.importorskip("hypothesis")
given, st = hypothesis.given, hypothesis.strategies
# A loaded machine is no failure.
unhurried = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])

BLOCKS = st.one_of(
    st.integers(1, 9).map(Rows),
    st.integers(1, 50).map(Elements),
    st.just(Whole()),
    st.builds(Tile, st.just(2), st.just(3)),
)


@st.composite
def tensors(draw):
    shape = tuple(draw(st.lists(st.integers(1, 8), min_size=2, max_size=3)))
    return TensorSpec("w", shape, draw(BLOCKS))


def fewest_slices(spec):
    """Elements of the fewest slices of dimension 0 of which every multiple is a cut point, by trying."""
    rows = spec.numel // spec.shape[0]
    return next(
        rows * count
        for count in range(1, spec.shape[0] + 1)
        if all(spec.grid.is_cut(cut) for cut in range(0, spec.numel, rows * count))
    )


@unhurried
@given(tensors(), st.integers(1, 20))
def test_even_rows_is_the_least_equal_chunk_of_whole_blocks(spec, world_size):
    step = fewest_slices(spec)
    chunk = next(size for size in range(step, spec.numel + step + 1, step) if size * world_size >= spec.numel)
    assert even_rows([spec], world_size) == world_size * chunk


@unhurried
@given(st.lists(tensors(), min_size=1, max_size=3), st.integers(1, 20))
def test_lcm_rule_is_the_least_shard_that_is_a_multiple_of_all_chunks(specs, world_size):
    chunk, total = math.lcm(*map(fewest_slices, specs)), sum(spec.numel for spec in specs)
    padded = lcm_rule(specs, world_size)
    assert padded % (world_size * chunk) == 0
    assert padded - world_size * chunk < total <= padded


def test_at_one_row_even_rows_is_what_fsdp2_pads_each_tensor_to():
    specs = [TensorSpec("a", (10, 3)), TensorSpec("b", (7,)), TensorSpec("c", (3, 2, 2)), TensorSpec("d", ())]
    assert even_rows(specs, 4) == 4 * (3 * 3 + 2 + 1 * 4 + 1)


LAYER = [TensorSpec("a", (12, 5), Rows(3)), TensorSpec("b", (40, 7)), TensorSpec("c", (9, 4), Whole())]


@unhurried
@given(st.lists(tensors(), min_size=1, max_size=4), st.integers(1, 6), st.booleans())
def test_the_given_order_is_kept_in_one_segment_of_a_valid_layout(specs, world_size, lcm):
    named = [TensorSpec(f"t{i}", s.shape, s.block) for i, s in enumerate(specs)]
    (segment,) = in_given_order(named, world_size, align=2, lcm=lcm).segments  # a Layout checks itself
    assert segment.names == tuple(spec.name for spec in named)


def test_the_given_order_takes_multiples_of_the_largest_tensors_block_or_of_all():
    (single,) = in_given_order(LAYER, 3, align=1).segments
    (common,) = in_given_order(LAYER, 3, align=1, lcm=True).segments
    assert single.shard_size % 7 == 0
    assert common.shard_size % math.lcm(15, 7, 36) == 0
    assert common.shard_size > single.shard_size


def test_planning_pads_no_more_than_the_given_order():
    assert plan(LAYER, 3).padded_numel <= in_given_order(LAYER, 3).padded_numel
