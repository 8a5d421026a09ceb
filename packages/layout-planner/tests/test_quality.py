"""How good plans are, against exhaustive search and against each other."""

import random

from layout_planner import Block, Elements, Rows, TensorSpec, Tile, Whole, plan

from .slow_checker import check, least_shard

INSTANCES = 500


def small_instance(seed):
    """Up to 6 tensors of up to 72 elements with mixed blocks and periods, 1 to 8 ranks."""
    rng = random.Random(seed)
    tensors = []
    for index in range(rng.randint(1, 6)):
        shape = tuple(rng.randint(1, 6) for _ in range(rng.choice((1, 2, 2, 3))))
        if len(shape) < 3 and rng.random() < 0.5:
            shape = (shape[0] * rng.randint(1, 4), *shape[1:])
        blocks: list[Block] = [Rows(rng.randint(1, 4)), Elements(rng.randint(1, 9)), Whole()]
        if len(shape) > 1:
            blocks.append(Tile(rng.randint(1, 3), 2))
        period = shape[1] * shape[2] if len(shape) == 3 and rng.random() < 0.5 else None
        tensors.append(TensorSpec(f"t{index}", shape, rng.choice(blocks), period))
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
