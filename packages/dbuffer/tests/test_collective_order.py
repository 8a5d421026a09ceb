"""Ranks tell each other the order of their collectives, each order once."""

from typing import Any

import pytest
import torch.distributed as dist

from dbuffer import _order
from dbuffer._order import CollectiveOrder, DisagreementError

hypothesis = pytest.importorskip("hypothesis")
given, st = hypothesis.given, hypothesis.strategies
# A loaded machine is no failure.
unhurried = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])


class Layer:
    """A device that is behind its host until it is let go on."""

    capturing = False

    def __init__(self):
        self.done = True

    def has_completed(self, event):
        return event is None or self.done

    def wait_on_host(self, event):
        assert self.has_completed(event)


def ranks_of(count):
    store = dist.HashStore()
    return [CollectiveOrder([10 + rank for rank in range(count)], rank, store) for rank in range(count)]


def start(order, titles):
    """As `Handle.launch` does."""
    for title in titles:
        order.titles.append(title)
        order.number += 1
        if tuple(order.titles) != order.expected[: len(order.titles)]:
            order.depart(Layer())


def run(order, titles, event=None):
    """Start these collectives and wait for them."""
    start(order, titles)
    order.completed = (order.number, event)


def pass_of_all(ranks, layer, *titles):
    """Each rank's collectives, which all have started when one has completed; each rank's error."""
    for order, mine in zip(ranks, titles, strict=True):
        start(order, mine)
    errors = []
    for order in ranks:
        order.completed = (order.number, None)
        try:
            order.compare(layer)
        except RuntimeError as error:
            errors.append(str(error))
        else:
            errors.append("")
    return errors


def test_an_error_names_the_first_difference_and_the_ranks_of_the_job():
    ranks, layer = ranks_of(2), Layer()
    for _ in range(2):
        assert pass_of_all(ranks, layer, ["gather a", "gather b"], ["gather a", "gather b"]) == ["", ""]
    one, two = pass_of_all(ranks, layer, ["gather a", "gather b"], ["gather b", "gather a"])
    assert "as number 1 of a pass rank 10 starts gather a, rank 11 gather b" in one
    assert "rank 11 starts gather b, and not all of ranks [10, 11] do so" in two


def test_ranks_that_announce_different_collectives_raise_before_they_start_them(monkeypatch):
    monkeypatch.setattr(_order, "_ASKING", 0.0)
    one, two, three = ranks_of(3)
    for order, title in zip((one, two, three), "aba", strict=True):
        start(order, [f"gather {title}"])
        order.check_waiting()
    for order, other in ((one, "rank 11 started gather b"), (two, "rank 10 started gather a")):
        with pytest.raises(DisagreementError, match=other):
            order.meet()


def test_ranks_that_depart_to_different_known_orders_all_raise():
    ranks, layer = ranks_of(3), Layer()
    orders = [["gather a", "gather b"], ["gather b", "gather a"], ["gather c", "gather a"]]
    for titles in [*orders, orders[0], orders[0]]:
        assert not any(pass_of_all(ranks, layer, titles, titles, titles))
    for error in pass_of_all(ranks, layer, *orders):
        assert "do not agree" in error


def test_a_rank_that_ends_a_known_shorter_order_is_seen_by_the_end_of_the_longer_one():
    ranks, layer = ranks_of(2), Layer()
    for titles in (
        ["gather a"],
        ["gather a", "gather b"],
        ["gather a", "gather b"],
        ["gather a", "gather b"],
    ):
        assert not any(pass_of_all(ranks, layer, titles, titles))
    assert pass_of_all(ranks[1:], layer, ["gather a"]) == [""]
    start(ranks[1], ["gather a"])  # its next pass
    (error,) = pass_of_all(ranks[:1], layer, ["gather a", "gather b"])
    assert "as number 2 of a pass rank 10 starts gather b, rank 11 nothing" in error


def test_orders_that_alternate_on_all_ranks_do_not_fill_the_store():
    ranks, layer = ranks_of(3), Layer()
    sizes = []
    for step in range(40):
        titles = ["gather a", "gather b"] if step % 3 % 2 else ["gather b", "gather a"]
        assert not any(pass_of_all(ranks, layer, titles, titles, titles))
        sizes.append(ranks[0]._store.num_keys())
    assert sizes[6] == sizes[-1]


def test_after_a_failed_pass_of_one_rank_only_unknown_orders_disagree():
    ranks, layer = ranks_of(2), Layer()
    gathers, reduces = ["gather a", "gather b"], ["reduce a", "reduce b"]
    for titles in [gathers, reduces] * 3:
        assert not any(pass_of_all(ranks, layer, titles, titles))
    for order in ranks:
        start(order, gathers)
    ranks[1].discard()
    ranks[0].completed = (ranks[0].number, None)
    ranks[0].compare(layer)
    for titles in [gathers, reduces, gathers, gathers, reduces, gathers, reduces]:
        assert not any(pass_of_all(ranks, layer, titles, titles))
    assert all(pass_of_all(ranks, layer, gathers, reduces))


def test_a_rank_that_leaves_a_failed_pass_first_agrees_with_others_later():
    ranks, layer = ranks_of(2), Layer()
    assert not any(pass_of_all(ranks, layer, ["reduce a"], ["reduce a"]))
    for order in ranks:
        start(order, ["reduce a"])
    for order in ranks:
        order.discard()
        order.compare(layer)  # a forward without a collective of this group
    for titles in (["reduce b"], ["reduce a"], ["reduce b"]):
        assert not any(pass_of_all(ranks, layer, titles, titles))


def test_a_rank_that_starts_one_less_is_named():
    ranks, layer = ranks_of(2), Layer()
    one, _ = pass_of_all(ranks, layer, ["gather a", "gather b"], ["gather a"])
    assert "as number 2 of a pass rank 10 starts gather b, and not all of ranks [10, 11] do so" in one


def test_nothing_is_said_before_a_later_collective_has_completed_on_the_device():
    one, two = ranks_of(2)
    layer = Layer()
    layer.done = False  # the device has not got there; rank 11 may be behind
    for number, title in enumerate(["gather a", "reduce a", "gather a"]):
        run(one, [title], f"event {number}")
        one.compare(layer)
    layer.done = True
    with pytest.raises(RuntimeError, match="do not agree"):
        one.compare(layer)
    assert two.titles == []


def test_an_order_that_was_agreed_for_one_model_is_not_for_the_next():
    ranks, layer, titles = ranks_of(2), Layer(), ["gather a", "gather b"]
    for model in "123":
        for order in ranks:
            order.begin(model)
        errors = pass_of_all(ranks, layer, titles, titles[::-1] if model == "3" else titles)
        assert all(("as number 1 of a pass" in error) == (model == "3") for error in errors)


def test_a_model_whose_order_is_new_in_each_pass_does_not_fill_the_store(caplog):
    ranks, layer = ranks_of(2), Layer()
    sizes = []
    for step in range(300):
        assert not any(pass_of_all(ranks, layer, [f"gather {step}"], [f"gather {step}"]))
        sizes.append(ranks[0]._store.num_keys())
    assert sizes[255] == sizes[-1] > sizes[254]
    assert len(ranks[0]._scopes[""].agreed) == 256
    assert "new orders are no longer compared" in caplog.text


def test_a_store_that_fails_ends_the_comparison_with_a_warning(caplog):
    class Broken(dist.Store):
        def set(self, key, value):
            raise RuntimeError("gone")

        def check(self, keys):
            raise RuntimeError("gone")

    order = CollectiveOrder([0, 1], 0, dist.HashStore())
    order._store = Broken()  # type: ignore[assignment]
    layer: Any = Layer()
    for titles in (["gather a"], ["reduce a"]):
        run(order, titles)
        order.compare(layer)
    assert "the store failed: gone" in caplog.text


@unhurried
@given(st.lists(st.lists(st.sampled_from("abc"), max_size=4), max_size=6), st.integers(2, 4))
def test_ranks_that_run_the_same_never_disagree(segments, count):
    ranks, layer = ranks_of(count), Layer()
    for titles in segments:
        assert not any(pass_of_all(ranks, layer, *[titles] * count))


@unhurried
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
    errors = [pass_of_all(ranks, layer, titles, titles, titles) for titles in segments[:-1]]
    errors.append(pass_of_all(ranks, layer, segments[-1], other, segments[-1]))
    errors.append(pass_of_all(ranks, layer, *[["end"]] * 3))
    assert any(second for _, second, _ in errors)


@unhurried
@given(
    st.lists(st.lists(st.sampled_from("abc"), min_size=2, max_size=4), min_size=1, max_size=6),
    st.lists(st.sampled_from("abcd"), min_size=2, max_size=4),
)
def test_every_rank_raises_at_the_end_of_the_pass_in_which_one_leaves_all_orders(segments, other):
    ranks, layer = ranks_of(3), Layer()
    if any(titles[: len(other)] == other for titles in segments):
        return
    for titles in [*segments, segments[-1]]:
        assert not any(pass_of_all(ranks, layer, titles, titles, titles))
    usual = (segments[-1] * 2)[: len(other)] if len(segments[-1]) < len(other) else segments[-1]
    if tuple(usual) not in ranks[0]._scopes[""].published:
        return
    assert all("do not agree" in error for error in pass_of_all(ranks, layer, usual, other, usual))


def test_a_rank_that_is_ahead_in_an_order_that_is_new_to_all_is_no_error():
    one, two = ranks_of(2)
    layer = Layer()
    assert pass_of_all((one, two), layer, ["gather a"], ["gather a"]) == ["", ""]
    start(one, ["gather a"])
    start(two, ["gather a"])
    two.completed = (two.number, None)
    two.compare(layer)
    start(two, ["gather b"])  # its next pass
    one.completed = (one.number, None)
    one.compare(layer)
    start(one, ["gather b"])
    for order in (one, two):
        order.completed = (order.number, None)
        order.compare(layer)
