"""`--memory-budget`: what a run holds stays below it, and its losses are those without it."""

import shlex

import pytest
from train_helpers import losses, tiny, train

from fsdp_runtime.train import PRESETS
from fsdp_runtime.train.__main__ import main
from fsdp_runtime.train.config import parse_bytes
from ragged_shard.testing import run_ranks

SIZES = {"model": PRESETS["small"], "seq_len": 64, "batch": 4, "steps": 3, "measure": True}


LAYER = 4 * (2 * 192 * 192 + 2 * 64 * 192 + 3 * 192 * 512)  # bytes of a gathered layer


def two_runs(folder, out):
    """Without a budget, and with one that is two layers and a half above the least."""
    train(tiny(folder, **SIZES), out / "whole")
    refused = train(tiny(folder, **SIZES, memory_budget=1000), out / "impossible")
    least = int(refused.split("at least ")[1].split(" bytes")[0].replace(",", ""))
    budget = least + 5 * LAYER // 2
    return budget, train(tiny(folder, **SIZES, memory_budget=budget), out / "tuned")


@pytest.mark.long
def test_a_run_stays_below_its_budget_and_its_losses_are_bit_for_bit_the_same(folder, tmp_path):
    (budget, tuned), (_, other) = run_ranks(2, two_runs, folder, tmp_path)
    assert not isinstance(tuned, str), tuned
    assert max(tuned["measured_peak"], other["measured_peak"]) <= budget
    assert len(tuned["kept"]) >= 2
    assert tuned["kept"] == other["kept"]
    assert losses(tmp_path / "tuned") == losses(tmp_path / "whole")


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8GiB", 8 << 30), ("1.5 MB", 1_500_000), ("123", 123), ("2kib", 2048)]
)
def test_bytes_are_given_with_and_without_a_unit(text, nbytes):
    assert parse_bytes(text) == nbytes


def test_a_plan_of_an_impossible_budget_says_what_is_possible(folder, capsys):
    options = shlex.split("plan --preset tiny --ranks 4 --batch 4 --device cpu --memory-budget 1KB --data")
    assert main([*options, str(folder / "text")]) == 2
    assert "--memory-budget 1,000: a rank is planned to hold" in capsys.readouterr().err
