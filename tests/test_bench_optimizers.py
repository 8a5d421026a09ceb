"""Benchmarks of optimizers in tiny forms: what they count, and the statistics of steps to a loss."""

import math

import pytest
from bench import optimizers, steps


@pytest.mark.long
def test_a_tiny_form_of_the_steps_benchmark_has_a_row_for_each_optimizer(monkeypatch):
    one_rate = {name: (steps.OPTIMIZERS[name][0], (4e-3,)) for name in ("AdamW", "AdamW8bit")}
    monkeypatch.setattr(steps, "OPTIMIZERS", one_rate)
    figures = steps.measure(tuple(one_rate), seeds=(0, 1), target=4.5, most=15)
    assert figures["chosen"] == {"AdamW": 4e-3, "AdamW8bit": 4e-3}
    table, grid = steps.tables_of(figures)
    assert [row[0] for row in table["rows"]] == [row[0] for row in grid["rows"]] == list(one_rate)
    means = [float(row[2]) for row in table["rows"]]
    assert all(5 <= mean <= 15 for mean in means)


@pytest.mark.parametrize("name", steps.OPTIMIZERS)
def test_two_runs_of_a_seed_have_the_same_losses(name):
    first, second = (steps.curve_of((name, 4e-3, 3, 0.0, 5)) for _ in range(2))
    assert first == second
    assert [step for step, _ in first] == [5]


def test_a_loss_that_is_never_reached_counts_twice_the_most_steps():
    assert steps.steps_to([(5, 3.0), (10, 2.4), (15, 2.3)], 2.4, 400) == 10
    assert steps.steps_to([(5, 3.0)], 2.4, 400) == 800


def test_the_rule_asks_for_a_mean_three_standard_errors_below_the_target():
    def curves(*offsets):
        return [[(5, 2.5 + x), (10, 2.39 + x), (15, 2.2 + x)] for x in offsets]

    assert steps.by_the_rule(curves(0.0, 0.0, 0.0, 0.0), 2.4) == 10
    assert steps.by_the_rule(curves(-0.1, 0.1, -0.1, 0.1), 2.4) == 15
    assert steps.by_the_rule(curves(-0.3, 0.3, -0.3, 0.3), 2.4) is None


def test_the_difference_of_two_means_is_over_its_standard_error():
    assert steps.welch([10.0, 12.0], [10.0, 12.0]) == 0
    assert steps.welch([14.0, 16.0], [10.0, 12.0]) == pytest.approx(4 / math.sqrt(2))


@pytest.mark.long
def test_muon_on_fully_shard_does_half_of_the_work_of_two_ranks_with_the_weights_of_one_process():
    by_system = optimizers.muon_on_ranks(2, rounds=1)
    assert {system: figures[5] for system, figures in by_system.items()} == dict.fromkeys(
        optimizers.MUONS, 0.0
    )
    ours, full = by_system[optimizers.OURS], by_system[optimizers.FULL]
    assert full[3] == len(optimizers.MUON_SHAPES)
    assert ours[3] < full[3]
    assert ours[4] == full[4] / 2


@pytest.mark.long
def test_plans_of_simulated_ranks_are_a_table_of_both_ways():
    table = optimizers.plans_table(ranks=(4,), models=("llama-3-8b",))
    assert {len(row) for row in table["rows"]} == {len(table["header"])}
    assert [row[2] for row in table["rows"]] == [optimizers.OURS, optimizers.FULL]
    ours, full = (float(row[3]) for row in table["rows"])
    assert ours == pytest.approx(full / 2, rel=1e-2)  # 2 x 3/4 of a rank's quarter, and 3 x a quarter
