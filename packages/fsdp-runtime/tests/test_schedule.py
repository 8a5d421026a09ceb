"""What is expected next follows from what came last time."""

import pytest

from fsdp_runtime._schedule.passes import Schedule


def run(schedule, order, expected=None):
    """Go through a pass; what was upcoming as each entered."""
    schedule.begin(expected)
    upcoming = []
    for unit in order:
        schedule.enter(unit)
        upcoming.append("".join(schedule.upcoming()))
    schedule.end()
    return upcoming


def test_nothing_is_expected_in_a_first_pass():
    assert run(Schedule(), "ABC") == ["", "", ""]


def test_a_second_pass_expects_the_order_of_the_first():
    schedule = Schedule[str]()
    run(schedule, "ABC")
    assert run(schedule, "ABC") == ["BC", "C", ""]


@pytest.mark.parametrize("order", ["ABAC", "AAB"])
def test_a_unit_that_runs_twice_is_expected_twice(order):
    schedule = Schedule[str]()
    run(schedule, order)
    assert run(schedule, order) == [order[i + 1 :] for i in range(len(order))]


def test_a_skipped_unit_is_passed_over():
    schedule = Schedule[str]()
    run(schedule, "ABCD")
    assert run(schedule, "ACD") == ["BCD", "D", ""]


def test_after_an_unknown_unit_nothing_is_expected_until_a_known_one_runs():
    schedule = Schedule[str]()
    run(schedule, "ABC")
    assert run(schedule, "AXBC") == ["BC", "", "C", ""]


def test_a_new_order_is_what_the_next_pass_expects():
    schedule = Schedule[str]()
    run(schedule, "ABC")
    run(schedule, "CBA")
    assert run(schedule, "CBA") == ["BA", "A", ""]


def test_an_order_can_be_given():
    assert run(Schedule(), "CB", expected=list("CBA")) == ["BA", "A"]
