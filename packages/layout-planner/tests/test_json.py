"""Reading layouts: what is not a layout is refused with a ValueError, at once."""

import json
import time

import pytest

from layout_planner import Layout, Rows, TensorSpec, Tile, plan

hypothesis = pytest.importorskip("hypothesis")
given, st = hypothesis.given, hypothesis.strategies
# A loaded machine is no failure.
unhurried = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])


def small_layout():
    specs = [TensorSpec("a", (4, 8), Rows(2)), TensorSpec("b", (16,)), TensorSpec("c", (3, 5, 8), Tile(2, 8))]
    return plan(specs, 2)


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


def test_a_million_ranks_are_planned_and_read_at_once():
    begin = time.process_time()
    layout = plan(
        [TensorSpec("a", (1 << 20, 4096), Rows(1)), TensorSpec("b", (1 << 21, 7), Rows(2))], 1 << 20
    )
    assert Layout.from_json(layout.to_json()) == layout
    assert time.process_time() - begin < 10  # seconds of CPU
