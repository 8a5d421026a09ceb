"""Ranges, boxes and parts, against counting elements one by one."""

import itertools
import math

import numpy as np
import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from ragged_shard import RaggedShard, StridedRaggedShard
from ragged_shard import _geometry as geo

hypothesis = pytest.importorskip("hypothesis")
given, st = hypothesis.given, hypothesis.strategies
# A loaded machine is no failure.
unhurried = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])


def validate(placements, mesh_shape, shape):
    geo.validate(placements, geo.ragged_axis(placements), mesh_shape, shape)


def region(placements, mesh_shape, shape, coordinate):
    return geo.region(placements, geo.ragged_axis(placements), mesh_shape, shape, coordinate)


@unhurried
@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes_cover_a_range_exactly_once_in_order_and_are_few(sizes, data):
    numel = math.prod(sizes)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    index = np.arange(numel).reshape(sizes)
    boxes = geo.range_boxes(tuple(sizes), start, stop)
    covered = [int(i) for box in boxes for i in index[box.slices()].reshape(-1)]
    assert covered == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(sizes) - 1)


@st.composite
def shardings(draw):
    """A shape, a mesh shape and placements that go together, one of them ragged."""
    ranks, others = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    units = draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks).filter(any))
    dims = draw(st.integers(1, 3))
    rest = draw(st.integers(0, 2))
    shape = [draw(st.integers(1, 3)) for _ in range(dims + rest)]
    strided = others > 1 and draw(st.booleans())
    shape[0] *= RaggedShard((0,), units).total_units * (others if strided else 1)
    prefix = tuple(range(dims))
    if strided:
        return tuple(shape), (ranks, others), (StridedRaggedShard(prefix, units, others), Shard(0))
    beside = draw(st.sampled_from([Replicate(), Partial()] + [Shard(d) for d in range(dims, dims + rest)]))
    return tuple(shape), (ranks, others), (RaggedShard(prefix, units), beside)


@unhurried
@given(shardings())
def test_regions_of_all_ranks_cover_the_tensor_exactly_once_for_each_replica(case):
    shape, mesh_shape, placements = case
    validate(placements, mesh_shape, shape)
    counted = np.zeros(shape, dtype=int)
    for coordinate in itertools.product(*map(range, mesh_shape)):
        held = region(placements, mesh_shape, shape, coordinate)
        boxes = held.boxes()
        assert sum(box.numel for box in boxes) == math.prod(held.local_shape)
        assert len(boxes) <= max(1, 2 * len(placements[0].dims) - 1)
        for box in boxes:
            counted[box.slices()] += 1
    replicas = 1 if isinstance(placements[1], Shard) else mesh_shape[1]
    assert (counted == replicas).all()


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (4, 0, 2)])
def test_tensors_without_elements_have_empty_extents(shape):
    placements = (RaggedShard((0,), (1, 1)),)
    validate(placements, (2,), shape)
    for rank in range(2):
        held = region(placements, (2,), shape, (rank,))
        assert held.local_shape == (shape[0] // 2, *shape[1:])
        assert held.boxes() == ()


def test_a_ragged_cut_is_made_inside_the_slices_of_a_shard_to_its_left():
    placements = (Shard(0), RaggedShard((0,), (1, 2)))
    validate(placements, (2, 2), (12, 2))
    regions = [region(placements, (2, 2), (12, 2), (i, j)) for i in range(2) for j in range(2)]
    assert [(r.boxes()[0].offsets[0], r.local_shape[0]) for r in regions] == [(0, 2), (2, 4), (6, 2), (8, 4)]


def test_a_shard_of_a_prefix_dimension_composes_when_no_cut_goes_through_it():
    placements = (RaggedShard((0, 1), (1, 3)), Shard(1))
    validate(placements, (2, 2), (4, 6, 2))
    regions = [region(placements, (2, 2), (4, 6, 2), (i, j)) for i in range(2) for j in range(2)]
    assert [r.local_shape for r in regions] == [(3, 2), (3, 2), (9, 2), (9, 2)]
    assert regions[3].boxes() == (geo.Box((1, 3, 0), (3, 3, 2)),)
