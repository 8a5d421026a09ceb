"""Ranks tell each other the order of their collectives, each order once."""

import pytest
import torch.distributed as dist

from dbuffer._order import CollectiveOrder

hypothesis = pytest.importorskip("hypothesis")
given, st = hypothesis.given, hypothesis.strategies


class Layer:
    """A device that is behind its host until it is let go on."""

    capturing = False

    def __init__(self):
        self.done = True

    def has_completed(self, event):
        return event is None or self.done


def ranks_of(count):
    store = dist.HashStore()
    return [CollectiveOrder([10 + rank for rank in range(count)], rank, store) for rank in range(count)]


def run(order, titles, event=None):
    """Start these collectives and wait for them."""
    order.titles += titles
    order.number += len(titles)
    order.completed = (order.number, event)


def pass_of(order, layer, *segments):
    for titles in segments:
        run(order, titles)
        order.compare(layer)


def test_an_error_names_the_first_difference_and_the_ranks_of_the_job():
    one, two = ranks_of(2)
    layer = Layer()
    pass_of(one, layer, ["gather a", "gather b"])
    pass_of(two, layer, ["gather b", "gather a"])
    with pytest.raises(RuntimeError, match="as number 1 of a pass rank 10 starts gather a, rank 11 gather b"):
        pass_of(one, layer, ["reduce a"])
    with pytest.raises(RuntimeError, match="rank 11 starts gather b, rank 10 gather a"):
        pass_of(two, layer, ["reduce a"])


def test_a_rank_that_starts_one_less_is_named():
    one, two = ranks_of(2)
    layer = Layer()
    pass_of(one, layer, ["gather a", "gather b"])
    pass_of(two, layer, ["gather a"])
    with pytest.raises(RuntimeError, match="as number 2 of a pass rank 10 starts gather b, rank 11 nothing"):
        pass_of(one, layer, ["reduce a"])


def test_nothing_is_said_before_a_later_collective_has_completed_on_the_device():
    one, two = ranks_of(2)
    layer = Layer()
    run(one, ["gather a"], "event 1")
    one.compare(layer)
    layer.done = False
    run(one, ["reduce a"], "event 2")
    one.compare(layer)  # the device has not got there; rank 11 may be behind
    run(one, ["gather a"], "event 3")
    one.compare(layer)
    layer.done = True
    with pytest.raises(RuntimeError, match="do not agree"):
        one.compare(layer)
    assert two.titles == []


def test_a_rank_that_is_slow_is_waited_for_without_blocking():
    one, two = ranks_of(2)
    layer = Layer()
    run(one, ["gather a"])
    one.compare(layer)
    one.compare(layer)  # nothing was started since
    run(two, ["gather a"])
    two.compare(layer)
    run(one, ["reduce a"])
    one.compare(layer)
    assert one._scopes[""].agreed == {("gather a",)}


def test_while_a_graph_is_captured_nothing_is_told():
    one, _ = ranks_of(2)
    layer = Layer()
    layer.capturing = True
    pass_of(one, layer, ["gather a"], ["reduce a"], ["gather a"])
    layer.capturing = False
    assert not one._scopes[""].told


def test_an_order_that_was_agreed_for_one_model_is_not_for_the_next():
    one, two = ranks_of(2)
    layer = Layer()
    for model in "12":
        for order in (one, two):
            order.begin(model)
            run(order, ["gather a", "gather b"])
        for order in (one, two):
            order.compare(layer)
    for order in (one, two):
        order.begin("3")
    pass_of(one, layer, ["gather a", "gather b"])
    pass_of(two, layer, ["gather b", "gather a"])
    for order in (one, two):
        with pytest.raises(RuntimeError, match="as number 1 of a pass"):
            pass_of(order, layer, ["reduce a"])


def test_a_model_whose_order_is_new_in_each_pass_does_not_fill_the_store(caplog):
    ranks, layer = ranks_of(2), Layer()
    sizes = []
    for step in range(300):
        for order in ranks:
            run(order, [f"gather {step}"])
        for order in ranks:
            order.compare(layer)
        sizes.append(ranks[0]._store.num_keys())
    assert sizes[255] == sizes[-1] > sizes[254]
    assert len(ranks[0]._scopes[""].agreed) == 256
    assert "new ones are compared no more" in caplog.text


def test_a_store_that_fails_ends_the_comparison_with_a_warning(caplog):
    class Broken(dist.Store):
        def set(self, key, value):
            raise RuntimeError("gone")

    order = CollectiveOrder([0, 1], 0, dist.HashStore())
    order._store = Broken()
    pass_of(order, Layer(), ["gather a"], ["reduce a"])
    assert "compared no more: the store failed: gone" in caplog.text


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=4), max_size=6), st.integers(2, 4))
def test_ranks_that_run_the_same_never_disagree(segments, count):
    ranks, layer = ranks_of(count), Layer()
    for titles in segments:
        for order in ranks:  # all have started it when the first has completed it
            order.titles += titles
            order.number += len(titles)
        for order in ranks:
            order.completed = (order.number, None)
            order.compare(layer)


@given(
    st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=4), min_size=1, max_size=6),
    st.integers(0, 5),
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=4),
)
def test_a_rank_that_runs_what_no_other_has_run_raises_by_the_next_segment(segments, at, other):
    ranks, layer = ranks_of(3), Layer()
    segments = segments[: at + 1]
    if other in segments:
        return
    errors = []
    for index, titles in enumerate([*segments, ["end"]]):
        for place, order in enumerate(ranks):
            last = index == len(segments) - 1
            order.titles += other if place == 1 and last else titles
            order.number += 1
        for place, order in enumerate(ranks):
            order.completed = (order.number, None)
            try:
                order.compare(layer)
            except RuntimeError:
                errors.append(place)
    assert 1 in errors
