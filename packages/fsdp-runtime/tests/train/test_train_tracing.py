"""Traces of steps."""

import json

import pytest
from train_helpers import tiny, train

from fsdp_runtime.train import Trainer
from ragged_shard.testing import run_ranks


def names(path):
    return {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}


def test_a_profile_has_its_steps_and_the_units_labels_on_each_rank(folder, tmp_path):
    run_ranks(2, train, tiny(folder, steps=3, profile="1:2"), tmp_path)
    assert len(list(tmp_path.glob("trace-*"))) == 2
    for rank in range(2):
        found = names(tmp_path / f"trace-rank-{rank}.json")
        assert {name for name in found if "ProfilerStep" in name} == {"ProfilerStep#1"}
        assert {"FSDP::all_gather (blocks.0)", "FSDP::post_backward_reduce (blocks.0)"} <= found


@pytest.mark.parametrize("begins", [0, 1])
def test_a_profile_may_begin_with_the_first_step_and_be_cut_off_by_the_end(folder, tmp_path, begins):
    profile, asked = ("0:2", "1:9")[begins], iter([0, 0, *[1] * 9])
    config = tiny(folder, system="one", steps=9, profile=profile)
    assert Trainer(config, tmp_path, quiet=True, stop=lambda: next(asked)).run()["stopped"]
    steps = {name for name in names(tmp_path / "trace-rank-0.json") if "ProfilerStep" in name}
    assert "ProfilerStep#1" in steps
    assert ("ProfilerStep#0" in steps, "ProfilerStep#2" in steps) == (begins == 0, begins == 1)
