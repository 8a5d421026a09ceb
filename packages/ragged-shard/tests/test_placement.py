"""Ragged placements: what they say, how they print, that published ones are read; ranges against counting elements."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Placement, Shard

from ragged_shard import RaggedShard, StridedRaggedShard
from ragged_shard import _geometry as geo


def test_shares_are_kept_in_lowest_terms_so_that_equal_placements_are_equal():
    a, b = RaggedShard((0,), (2, 4, 0, 2)), RaggedShard([0], [1, 2, 0, 1])
    assert a == b
    assert hash(a) == hash(b)
    assert b.local_units == (1, 2, 0, 1)
    assert a.total_units == 4
    assert [a.unit_range(r) for r in range(4)] == [(0, 1), (1, 3), (3, 3), (3, 4)]


def test_placements_that_differ_are_not_equal():
    a = RaggedShard((0,), (1, 2))
    others = [
        RaggedShard((0,), (2, 1)),
        RaggedShard((0, 1), (1, 2)),
        StridedRaggedShard((0,), (1, 2)),
        Shard(0),
    ]
    assert all(a != other for other in others)
    assert StridedRaggedShard((0,), (1, 2), 2) != StridedRaggedShard((0,), (1, 2), 4)


@pytest.mark.parametrize("placement", [RaggedShard((0, 1), (1, 0, 2)), StridedRaggedShard((0,), (1, 1), 4)])
def test_a_placement_survives_pickle_and_copies(placement):
    for copied in (pickle.loads(pickle.dumps(placement)), copy.deepcopy(placement), copy.copy(placement)):
        assert copied == placement
        assert type(copied) is type(placement)
        assert repr(copied) == repr(placement)


def test_a_placement_is_no_kind_that_torch_handles():
    placement = RaggedShard((0,), (1, 1))
    assert isinstance(placement, Placement)
    assert [placement.is_shard(), placement.is_replicate(), placement.is_partial()] == [False] * 3


@pytest.mark.parametrize(
    "placement", [RaggedShard((0,), (1, 1)), StridedRaggedShard((0,), (1, 1)), RaggedShard((), (1, 0))]
)
def test_torch_finds_a_shard_whose_dim_is_an_index_and_equals_none(placement):
    # So torch asks for its dim, and does not pass over an unknown placement; who looks for Shard(0) finds none.
    assert isinstance(placement, Shard)
    assert "abc"[placement.dim] == "a"
    assert [placement.dim == 0, placement.dim != 0, placement.dim in (0, 1)] == [False, True, False]
    assert [placement.is_shard(0), placement == Shard(0)] == [False, False]


def test_torch_load_reads_a_placement_with_weights_only(tmp_path):
    torch.save(RaggedShard((0,), (1, 2)), tmp_path / "placement.pt")
    assert torch.load(tmp_path / "placement.pt") == RaggedShard((0,), (1, 2))


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
