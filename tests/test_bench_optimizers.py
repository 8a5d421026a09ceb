"""Benchmarks of Muon in tiny forms: what it computes and sends on a rank."""

import pytest
from bench import optimizers


@pytest.mark.long
def test_muon_does_half_of_the_work_on_each_of_two_ranks():
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
