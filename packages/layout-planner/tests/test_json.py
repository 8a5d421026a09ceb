"""Reading layouts: what is not a layout is refused with a ValueError, at once."""

import json
import math
import time

import pytest

from layout_planner import Layout, Rows, Segment, TensorSpec, plan

hypothesis = pytest.importorskip("hypothesis")
given, st = hypothesis.given, hypothesis.strategies
# A loaded machine is no failure.
unhurried = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])


def small_layout():
    specs = [
        TensorSpec("a", (4, 8), Rows(2)),
        TensorSpec("b", (16,)),
        TensorSpec("c", (3, 5, 8), Rows(2), period=40),
    ]
    return plan(specs, 2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.update(format=99), "format is 99"),
        (lambda c: c.pop("world_size"), "world_size"),
        (lambda c: c["segments"][0].update(shard_size=24), "starts inside a block|past 2 shards"),
        (lambda c: c["segments"][0]["offsets"].__setitem__(1, 8), "or overlaps"),
        (lambda c: c["segments"][0]["offsets"].__setitem__(1, 36), "not a multiple of 8"),
        (lambda c: c["segments"][0].update(names=["a", "a", "c"]), "the segments hold"),
        (lambda c: c["tensors"][0].update(shape=[0]), r"a size in shape \(0,\) is 0"),
        (lambda c: c.update(align=-1), "align is -1"),
        (lambda c: c.update(align=0), "align is 0"),
        (lambda c: c.update(align=True), "align is True"),
        (lambda c: c.update(world_size=math.inf), "world_size is inf"),
        (lambda c: c.update(world_size=2.0), r"world_size is 2\.0"),
        (
            lambda c: c.update(world_size=10**12),
            "world_size is 1000000000000; expected an integer of at most 1048576",
        ),
        (lambda c: c["segments"][0].update(shard_size=math.nan), "segment 0: shard_size is nan"),
        (lambda c: c["segments"][0].update(shard_size="64"), "segment 0: shard_size is '64'"),
        (lambda c: c["segments"][0]["offsets"].__setitem__(0, 0.5), r"a: offset is 0\.5"),
        (lambda c: c["segments"][0]["names"].__setitem__(0, ["a"]), "not a layout"),
        (lambda c: c["tensors"][0].update(name=3), "not a layout"),
        (lambda c: c["tensors"][0].update(period=math.inf), "not a layout"),
        (lambda c: c["tensors"][0].update(period=0), "a: period is 0"),
        (lambda c: c["tensors"][0].update(block=None), "not a layout"),
        (lambda c: c["tensors"][0].update(shape=7), "not a layout"),
        (lambda c: c.update(segments=[]), "the segments hold"),
        (lambda c: c.update(segments=None), "not a layout"),
    ],
)
def test_a_tampered_layout_is_refused_on_reading(change, says):
    content = json.loads(small_layout().to_json())
    change(content)
    with pytest.raises(ValueError, match=says):
        Layout.from_json(json.dumps(content))


def test_text_that_is_not_a_layout_nested_too_deeply_or_with_too_long_a_number_is_refused():
    for text in (
        "",
        "[]",
        "null",
        '{"format": 1}',
        "[" * 100_000,
        *('{"format": ' + c * 100_000 for c in "[9"),
    ):
        with pytest.raises(ValueError, match="not a layout"):
            Layout.from_json(text)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.data(), JSON)
@unhurried
def test_whatever_stands_in_a_layout_it_is_read_back_or_refused_with_a_value_error(data, value):
    content = json.loads(small_layout().to_json())
    place, path = content, data.draw(st.integers(1, 4))
    for _ in range(path):
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], (dict, list)) or not place[key]:
            break
        place, parent, key_in_parent = place[key], place, key
    if place is content:
        content[data.draw(st.sampled_from(list(content)))] = value
    else:
        parent[key_in_parent] = value
    try:
        layout = Layout.from_json(json.dumps(content))
    except ValueError:
        return
    assert Layout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize("world_size", [(1 << 20) + 1, 10**9, 10**30])
def test_a_huge_world_size_ends_at_once_with_an_error(world_size):
    specs = [TensorSpec("a", (4096, 4096), Rows(3)), TensorSpec("b", (7,))]
    with pytest.raises(
        ValueError, match=f"world_size is {world_size}; expected an integer of at most 1048576"
    ):
        plan(specs, world_size)


def test_a_million_ranks_are_planned_and_read_at_once():
    begin = time.process_time()
    layout = plan(
        [TensorSpec("a", (1 << 20, 4096), Rows(1)), TensorSpec("b", (1 << 21, 7), Rows(2))], 1 << 20
    )
    assert Layout.from_json(layout.to_json()) == layout
    assert time.process_time() - begin < 10  # seconds of CPU


def test_boundaries_of_a_tensor_are_not_checked_one_by_one():
    begin = time.process_time()
    specs = (TensorSpec("a", (10**6, 10**6)),)
    for shard, error in ((10**6, None), (10**6 - 8, "starts inside a block")):
        content = json.loads(Layout(specs, 1 << 20, 8, (Segment(10**6, ("a",), (0,)),)).to_json())
        content["segments"][0]["shard_size"] = shard
        if error is None:
            Layout.from_json(json.dumps(content))
        else:
            with pytest.raises(ValueError, match=f"{error}|past"):
                Layout.from_json(json.dumps(content))
    periodic = (TensorSpec("a", (10**9 + 1, 1), Rows(2), period=10**9 + 1), TensorSpec("b", (8,)))
    with pytest.raises(ValueError, match=r"inside a block|past|not a multiple"):
        Layout(periodic, 1 << 20, 2, (Segment(2, ("a", "b"), (0, 10**9 + 2)),))
    assert time.process_time() - begin < 5  # seconds of CPU
