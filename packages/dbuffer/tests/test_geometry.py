"""Layouts of which slices are off a boundary, and where two layouts differ first."""

import pytest
import torch

from dbuffer.memory.geometry import alignment_problem, first_difference
from layout_planner import Layout, Segment, TensorSpec


def two(offset=8, size=16, segments=1):
    specs = (TensorSpec("a", (4,)), TensorSpec("b", (4,)))
    if segments == 2:
        return Layout(specs, 1, 4, (Segment(size, ("a",), (0,)), Segment(size, ("b",), (offset,))))
    return Layout(specs, 1, 4, (Segment(size, ("a", "b"), (0, offset)),))


@pytest.mark.parametrize(
    ("layout", "dtype", "message"),
    [
        (two(), torch.bfloat16, None),
        (two(offset=4), torch.bfloat16, "b starts at byte 8, .* plan with align=8"),
        (two(size=20), torch.bfloat16, "a rank's slice has 40 bytes, .* plan with align=8"),
        (two(offset=4, size=20), torch.float32, None),
        (two(), torch.uint8, "b starts at byte 8, .* plan with align=16"),
        (two(offset=2 * 4, size=12), torch.float64, None),
    ],
)
def test_what_is_off_a_16_byte_boundary_is_named(layout, dtype, message):
    found = alignment_problem(layout, (torch.float64, dtype))
    if message is None:
        assert found is None
    else:
        with pytest.raises(ValueError, match=message):
            raise ValueError(found)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (two(), None),
        (two(offset=12), "tensor b is at element 8 of segment 0 here, at element 12 of segment 0 there"),
        (two(segments=2), "tensor b is at element 8 of segment 0 here, at element 8 of segment 1 there"),
        (two(size=20), "segment 0 has shards of 16 elements here, 20 there"),
    ],
)
def test_the_first_difference_of_two_layouts_is_named(other, message):
    assert first_difference(two(), other) == message
