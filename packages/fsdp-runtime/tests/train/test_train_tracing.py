"""Traces of steps."""

import json

import pytest
from train_helpers import tiny, train

from fsdp_runtime.train import Trainer, TrainError
from ragged_shard.testing import run_ranks


def names(path):
    """Names of a trace's events."""
    return {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}


def test_a_profile_has_its_steps_and_the_units_labels_on_each_rank(folder, tmp_path):
    run_ranks(2, train, tiny(folder, steps=3, profile="1:2"), tmp_path)
    assert len(list(tmp_path.glob("trace-*"))) == 2
    for rank in range(2):
        found = names(tmp_path / f"trace-rank-{rank}.json")
        assert {name for name in found if "ProfilerStep" in name} == {"ProfilerStep#1"}
        assert {"FSDP::all_gather (blocks.0)", "FSDP::post_backward_reduce (blocks.0)"} <= found


def test_a_profile_may_begin_with_the_first_step(folder, tmp_path):
    Trainer(tiny(folder, system="one", steps=3, profile="0:2"), tmp_path, quiet=True).run()
    steps = {name for name in names(tmp_path / "trace-rank-0.json") if "ProfilerStep" in name}
    assert steps == {"ProfilerStep#0", "ProfilerStep#1"}


def test_a_profile_that_the_end_cuts_off_is_written(folder, tmp_path):
    stops = iter([0, 0, 1, 1, 1, 1])
    config = tiny(folder, system="one", steps=9, profile="1:9")
    summary = Trainer(config, tmp_path, quiet=True, stop=lambda: next(stops)).run()
    assert summary["stopped"]
    assert "ProfilerStep#1" in names(tmp_path / "trace-rank-0.json")


@pytest.mark.parametrize("profile", ["3", "3:", "3:3", "4:3", "-1:3", "a:b"])
def test_a_profile_without_steps_is_refused(folder, profile):
    with pytest.raises(TrainError, match=f"--profile {profile}: expected START:STOP"):
        tiny(folder, profile=profile).check(1)


def test_a_profile_beyond_the_last_step_is_refused(folder):
    tiny(folder, steps=8, profile="7:8").check(1)
    with pytest.raises(TrainError, match="--profile 7:9: the last step of --steps 8 is 7"):
        tiny(folder, steps=8, profile="7:9").check(1)
