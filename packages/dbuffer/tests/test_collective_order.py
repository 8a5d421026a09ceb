"""Each rank predicts its next collective, and ranks that differ start none."""

from collections import Counter
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import make

from dbuffer import wait_in_order, watch_order
from dbuffer._order import CollectiveOrder, DisagreementError, compare_mode
from ragged_shard.device import device_layer
from ragged_shard.testing import on_ranks

LAYER = device_layer("cpu")
FORWARD, BACKWARD = ("gather a", "gather b"), ("gather b", "reduce b", "reduce a")


def order_of(seconds=30.0) -> CollectiveOrder:
    order = watch_order(dist.new_group(timeout=timedelta(seconds=seconds)))
    assert order is not None
    return order


def run(order, *passes):
    for titles in passes:
        for title in titles:
            order.start(title, LAYER)
        order.end_pass(LAYER)


def costs_of(order, steps):
    """(departures, comparisons, requests of the store) of each step, which is a list of passes."""
    costs = []
    for step in steps:
        counts: Counter[str] = Counter()

        def counted(name, call, counts=counts):
            def wrapper(*args):
                counts[name] += 1
                return call(*args)

            return wrapper

        store = mock.Mock(wraps=order._store)
        with (
            mock.patch.object(order, "compare", counted("compare", order.compare)),
            mock.patch.object(order, "_depart", counted("depart", order._depart)),
            mock.patch.object(order, "_store", store),
        ):
            run(order, *step)
        costs.append((counts["depart"], counts["compare"], len(store.method_calls)))
    return costs


@on_ranks(2)
def test_a_repeated_program_costs_no_request_and_no_collective():
    for step in ([FORWARD, BACKWARD], [FORWARD, FORWARD, BACKWARD], [FORWARD] * 4 + [BACKWARD]):
        assert costs_of(order_of(), [step] * 6)[-1] == (0, 0, 0)


@on_ranks(2)
def test_a_switch_between_known_programs_departs_at_most_once_a_pass():
    order, train = order_of(), [FORWARD, BACKWARD]
    costs = costs_of(order, [train, train, [FORWARD], train, train, [FORWARD], train, train])
    departures, comparisons = ([cost[kind] for cost in costs[3:]] for kind in (0, 1))
    assert sum(comparisons) == 0
    assert max(departures) <= 2


@on_ranks(3)
def test_a_new_program_is_compared_and_its_ranks_go_on():
    order = order_of()
    run(order, *[FORWARD, BACKWARD] * 3)
    for _ in range(3):
        run(order, ("gather c", *FORWARD), BACKWARD)
    assert costs_of(order, [[("gather c", *FORWARD), BACKWARD]]) == [(0, 0, 0)]


@on_ranks(3)
def test_ranks_that_differ_in_a_first_pass_all_raise_and_name_both():
    order, last = order_of(), dist.get_rank() == 2
    order.start("gather a", LAYER)
    named = r"as number 2 of a pass rank . starts gather ., rank . gather [bc]\."
    with pytest.raises(DisagreementError, match=named):
        order.start("gather c" if last else "gather b", LAYER)


@on_ranks(3)
def test_a_rank_that_departs_alone_raises_before_it_starts_anything():
    order, last = order_of(seconds=1.0), dist.get_rank() == 2
    run(order, *[FORWARD, BACKWARD] * 3)
    if last:
        with pytest.raises(DisagreementError, match="starts gather b where gather a was expected"):
            order.start("gather b", LAYER)
    else:
        order.start("gather a", LAYER)


@on_ranks(3)
def test_ranks_that_depart_to_different_collectives_name_each_other():
    order, rank = order_of(), dist.get_rank()
    run(order, *[FORWARD, BACKWARD] * 3)
    with pytest.raises(DisagreementError, match=rf"rank {rank} starts gather {rank}, rank [^{rank}] gather"):
        order.start(f"gather {rank}", LAYER)


@on_ranks(3)
def test_ranks_that_wait_for_one_that_departs_raise_with_it_before_any_timeout():
    group = dist.new_group(timeout=timedelta(minutes=30))
    order, last = watch_order(group), dist.get_rank() == 2
    run(order, *[FORWARD, BACKWARD] * 3)
    named = r"rank . starts gather ., rank . gather [ab]\."
    if last:
        with pytest.raises(DisagreementError, match=named):
            order.start("gather b", LAYER)
    else:
        order.start("gather a", LAYER)
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        with pytest.raises(DisagreementError, match=named):
            wait_in_order(work, group)
        assert not work.is_completed()


@on_ranks(2)
def test_a_rank_whose_pass_ends_early_raises():
    order, first = order_of(seconds=1.0), dist.get_rank() == 0
    run(order, *[FORWARD, BACKWARD] * 3)
    for title in FORWARD if first else FORWARD[:1]:
        order.start(title, LAYER)
    if first:
        order.end_pass(LAYER)
    else:
        with pytest.raises(DisagreementError, match="the end of a pass where gather b was expected"):
            order.end_pass(LAYER)


@on_ranks(2)
def test_after_an_exception_on_all_ranks_they_go_on_and_after_one_on_one_rank_it_raises():
    order = order_of(seconds=1.0)
    run(order, *[FORWARD, BACKWARD] * 3)
    order.start(FORWARD[0], LAYER)
    order.cut_off()
    run(order, *[FORWARD, BACKWARD] * 3)
    assert costs_of(order, [[FORWARD, BACKWARD]]) == [(0, 0, 0)]
    for title in FORWARD:
        order.start(title, LAYER)
    if dist.get_rank() == 0:
        order.cut_off()
        with pytest.raises(DisagreementError, match="gather a, after an exception"):
            run(order, FORWARD)


@on_ranks(2)
def test_after_an_exception_on_one_rank_a_rank_that_compares_raises_too():
    order = order_of()
    run(order, FORWARD)  # what follows is not predicted
    if dist.get_rank() == 1:
        order.cut_off()
    with pytest.raises(
        DisagreementError, match=r"reduce a.*gather a, after an exception|gather a, after .*reduce a"
    ):
        order.start("gather a" if dist.get_rank() == 1 else "reduce a", LAYER)


@on_ranks(2)
def test_the_store_does_not_grow_with_departures():
    order, sizes = order_of(), []
    programs: list[Any] = [[FORWARD, BACKWARD], [FORWARD[::-1], BACKWARD], [FORWARD]]
    chance = torch.Generator().manual_seed(0)
    for _ in range(40):
        run(order, *programs[int(torch.randint(3, (), generator=chance))])
        dist.barrier()
        sizes.append(dist.group.WORLD.get_group_store().num_keys())
        dist.barrier()
    assert max(sizes[8:]) == max(sizes[:8])


@on_ranks(2)
def test_all_titles_are_compared_where_that_is_asked_and_none_where_it_is_refused(monkeypatch):
    for mode, comparisons in (("always", 5), ("never", 0)):
        monkeypatch.setenv("DBUFFER_COMPARE", mode)
        assert costs_of(order_of(), [[FORWARD, BACKWARD]] * 4)[-1] == (0, comparisons, 0)


@on_ranks(2)
def test_ranks_that_compare_in_different_ways_refuse_to_share_a_buffer(monkeypatch):
    monkeypatch.setenv("DBUFFER_COMPARE", "always" if dist.get_rank() else "never")
    with pytest.raises(
        ValueError, match=r"DBUFFER_COMPARE (always|never) here, .*DBUFFER_COMPARE (always|never) there"
    ):
        make()
    dist.barrier()
    monkeypatch.setenv("DBUFFER_COMPARE", "sometimes" if dist.get_rank() else "")
    with pytest.raises((ValueError, RuntimeError), match="DBUFFER_COMPARE is 'sometimes'"):
        make()


def test_an_unknown_mode_is_refused(monkeypatch):
    monkeypatch.setenv("DBUFFER_COMPARE", "sometimes")
    with pytest.raises(ValueError, match="'sometimes'; expected one of first, always, never"):
        compare_mode()
