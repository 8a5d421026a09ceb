"""What a plan says of splits is what their ranks hold and send, and which splits it finds."""

import dataclasses
from collections import defaultdict
from pathlib import Path

import pytest
from train_helpers import tiny, train

from fsdp_runtime.train import PRESETS, Trainer, TrainError
from fsdp_runtime.train.plan.command import candidates, print_plan
from fsdp_runtime.train.plan.memory import make_plan
from fsdp_runtime.train.plan.traffic import traffic_of, traffic_of_units
from fsdp_runtime.train.splits import AXES, SCHEDULES, Splits, find_splits
from ragged_shard.testing import record_collectives, run_ranks

pytestmark = pytest.mark.long

SMALL = dataclasses.replace(PRESETS["small"], tied=False)


@pytest.mark.parametrize(
    ("off", "changes"),
    [
        (0.06, {"tp": 2, "ep": 4, "model": PRESETS["small-moe"]}),
        (0.06, {"cp": 2, "hsdp": 2}),
        (0.13, {"pp": 2, "tp": 2}),
    ],
)
def test_a_rank_of_a_split_holds_what_was_planned(folder, tmp_path, off, changes):
    config = tiny(folder, **{"model": SMALL, "seq_len": 64, "batch": 8, "accumulate": 2, **changes})
    config = dataclasses.replace(config, steps=6, measure=True)
    plan = make_plan(config, 256, 4)
    measured = run_ranks(4, train, config, tmp_path, timeout=120)[0]
    assert measured["measured_rest"] == pytest.approx(plan.at_rest, rel=0.04)
    assert (1 - 2 * off) * plan.peak <= measured["measured_peak"] <= (1 + off) * plan.peak


def count(configs, out):
    """Bytes that this rank sends in a step of each run, by kind of collective."""
    found = []
    for number, config in enumerate(configs):
        trainer = Trainer(config, Path(out) / str(number), quiet=True)
        trainer._train_step()
        with record_collectives() as record:
            trainer._train_step()
        kinds: dict[str, float] = defaultdict(float)
        for event in record.events:
            kinds[event.kind] += event.bytes_sent
        found.append(kinds)
    return found


def test_a_step_sends_the_bytes_of_its_units(folder, tmp_path):
    config = tiny(folder, batch=8, hsdp=2, accumulate=2, precision="bf16")
    planned = traffic_of_units(config, make_plan(config, 256, 4).units, config.splits(4))
    found = run_ranks(4, count, [config], str(tmp_path), timeout=120)[0][0]
    assert found["all_gather"] + found["reduce_scatter"] == pytest.approx(planned.fsdp, rel=0.001)
    assert found["all_reduce"] == pytest.approx(planned.hsdp, rel=0.001, abs=1000)  # and the step's figures


def test_what_two_more_layers_send_is_what_was_predicted(folder, tmp_path):
    cases = {
        "tp": {"tp": 2, "hsdp": 2},
        "cp": {"cp": 2, "reshard": False},
        "ep": {"ep": 4, "num_experts": 4, "hsdp": 1},
    }
    runs = []
    for changes in cases.values():
        experts = changes.pop("num_experts", 0)
        for layers in (2, 4):
            model = dataclasses.replace(PRESETS["tiny"], num_layers=layers, num_experts=experts, tied=False)
            runs.append(tiny(folder, model=model, batch=8, accumulate=2, **changes))
    found = run_ranks(4, count, runs, str(tmp_path), timeout=120)
    for number, name in enumerate(cases):
        small, large = runs[2 * number : 2 * number + 2]
        more = {
            kind: sum(ranks[2 * number + 1][kind] - ranks[2 * number][kind] for ranks in found) / 4
            for kind in ("all_gather", "reduce_scatter", "all_to_all")
        }
        said = [traffic_of(run, run.model, run.splits(4)) for run in (small, large)]
        if name == "ep":  # as even as the routers are
            assert more["all_to_all"] == pytest.approx(said[1].ep - said[0].ep, rel=0.1)
            continue
        planned = sum(getattr(said[1], axis) - getattr(said[0], axis) for axis in ("fsdp", "tp", "cp"))
        assert more["all_gather"] + more["reduce_scatter"] == pytest.approx(planned, rel=0.02), name


def test_every_candidate_is_a_split_that_the_run_takes(folder):
    model = dataclasses.replace(PRESETS["small-moe"], tied=False)
    config = tiny(folder, model=model, batch=16, accumulate=2)
    found = candidates(config, 8)
    assert len(found) == len(set(found))
    assert {splits.world_size for splits in found} == {8}
    assert Splits(fsdp=2, tp=2, pp=2, ep=4) in found
    assert not [splits for splits in found if splits.tp > 2]  # two key/value heads


def test_a_bubble_shrinks_with_microbatches_and_with_schedules_that_fill_it():
    for schedule in SCHEDULES:
        splits = find_splits({**dict.fromkeys(AXES, 1), "pp": 4}, schedule, 4)
        assert splits.bubble(32) < splits.bubble(8) <= 3 / 11
    assert find_splits({**dict.fromkeys(AXES, 1), "pp": 4}, "1f1b", 4).bubble(4) == 3 / 7


def test_the_plan_lists_the_splits_that_fit_and_send_least_first(folder, capsys):
    config = tiny(folder, model=PRESETS["tiny"], batch=8)
    assert print_plan(config, 4, 0.001) == 0
    table = capsys.readouterr().out.partition("| split |")[2].splitlines()[2:]
    rows = [line.split(" | ") for line in table if line.startswith("| ")]
    sent = [float(row[3]) for row in rows]
    assert rows
    assert sent == sorted(sent)
    assert all(float(row[1]) <= 0.001 for row in rows)
    with pytest.raises(TrainError, match="does not divide by 5 ranks"):
        print_plan(dataclasses.replace(config, batch=7, seq_len=33), 5)


def test_a_chosen_split_is_planned_alone(folder, capsys):
    config = tiny(folder, model=dataclasses.replace(PRESETS["tiny-moe"], num_experts=4), batch=8, ep=2, cp=2)
    assert print_plan(config, 4) == 0
    said = capsys.readouterr().out
    assert "one rank sends in a step (fsdp 2 x cp 2 x ep 2;" in said
    assert ", ep 0." in said
    assert "splits of 4 ranks" not in said
