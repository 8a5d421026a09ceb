"""Ranges, boxes and parts, against counting elements one by one."""

import math

import numpy as np
import pytest
from torch.distributed.tensor import Shard

from ragged_shard import RaggedShard
from ragged_shard import _geometry as geo

hypothesis = pytest.importorskip("hypothesis")
given, st = hypothesis.given, hypothesis.strategies
# A loaded machine is no failure.
unhurried = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])


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


def test_a_shard_of_a_prefix_dimension_composes_when_no_cut_goes_through_it():
    placements = (RaggedShard((0, 1), (1, 3)), Shard(1))
    geo.validate(placements, 0, (2, 2), (4, 6, 2))
    regions = [geo.region(placements, 0, (2, 2), (4, 6, 2), (i, j)) for i in range(2) for j in range(2)]
    assert [r.local_shape for r in regions] == [(3, 2), (3, 2), (9, 2), (9, 2)]
    assert regions[3].boxes() == (geo.Box((1, 3, 0), (3, 3, 2)),)
