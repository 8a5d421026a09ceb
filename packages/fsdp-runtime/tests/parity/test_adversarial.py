"""Awkward models, failing passes, dying ranks, wrong arguments."""

import re

import pytest
from adversarial_cases import (
    dies,
    evaluation_fails,
    many_short_lives,
    optimizers_that_stay_quiet,
    refused_at_wrap_time,
    survive_many,
)
from adversarial_ends import train_all
from adversarial_trees import train_many

from ragged_shard.testing import RankError, run_ranks

pytestmark = pytest.mark.long


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_random_trees_train_as_in_one_process_whatever_the_parameters_and_the_order_of_wrapping(
    ranks: int,
) -> None:
    run_ranks(ranks, train_many, "ours", list(range(100 * ranks, 100 * ranks + 12)), True, timeout=240)


def test_the_random_trees_that_fsdp2_can_shard_train_the_same_under_it() -> None:
    run_ranks(3, train_many, "fsdp2", list(range(12)), False, timeout=240)
    run_ranks(3, train_many, "ours", list(range(12)), False, timeout=240)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
def test_large_ends_around_units_train_as_in_one_process_however_they_are_used(ranks: int) -> None:
    run_ranks(ranks, train_all, timeout=240)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_pass_that_raises_leaves_no_trace_in_the_next_step_with_or_without_a_reset(ranks: int) -> None:
    run_ranks(ranks, survive_many, list(range(8)), timeout=240)


def test_an_evaluation_that_raises_leaves_no_trace() -> None:
    run_ranks(2, evaluation_fails)


@pytest.mark.parametrize(("how", "limit"), [("dies", 1000.0), ("sleeps", 3.0)])
def test_when_a_rank_is_gone_the_others_fail_in_time_and_say_in_which_collective_of_which_unit(
    how: str, limit: float
) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(3, dies, how, limit)
    assert caught.value.causes, caught.value
    for message in map(str, caught.value.causes.values()):
        assert re.search(r"blocks\.\d", message), message
        assert re.search(r"(?i)all.?gather|reduce.?scatter", message), message


WRAP_ERRORS = {
    "policy gives a number": "ValueError: .*weight.*3",
    "policy gives a tile for a vector": "ValueError: .*bias",
    "policy is no function": "(TypeError|ValueError): .*block_policy",
    "policy raises": "ZeroDivisionError|ValueError: .*weight",
    "complex": "(TypeError|ValueError): .*odd.*complex64",
    "ranks differ": r"ValueError: .*odd",
    "policies differ": "ValueError: .*(weight|bias)",
    "precision": "(TypeError|ValueError): .*mp_policy",
    "mesh": "(TypeError|ValueError): .*mesh",
    "ignored": "(TypeError|ValueError): .*ignored_params",
}


def test_wrong_arguments_are_refused_at_wrap_time_on_every_rank_naming_parameter_and_value() -> None:
    for rank, found in enumerate(run_ranks(2, refused_at_wrap_time)):
        assert found.keys() == WRAP_ERRORS.keys()
        for what, message in found.items():
            assert re.match(WRAP_ERRORS[what], message, re.DOTALL), f"rank {rank}, {what}: {message}"


def test_optimizers_of_other_and_of_ignored_parameters_step_as_ever() -> None:
    run_ranks(2, optimizers_that_stay_quiet)


def test_models_that_come_and_go_leave_no_threads_and_no_files() -> None:
    for counts in run_ranks(2, many_short_lives):
        assert counts[2:] == [counts[-1]] * len(counts[2:]), counts
