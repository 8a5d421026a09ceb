"""The folder of a run, and the options of a resumed one."""

import argparse
import dataclasses

import pytest

from fsdp_runtime.train import PRESETS, RunConfig, TrainError
from fsdp_runtime.train.checkpoint import CHECKPOINTS, choose_folder
from fsdp_runtime.train.config import add_run_options, resumed_config


def test_a_folder_has_one_run_at_a_time(tmp_path):
    config = RunConfig(out=str(tmp_path))
    with choose_folder(config), pytest.raises(TrainError, match="in use by"), choose_folder(config):
        pass
    with choose_folder(config) as (again, _):
        assert again == tmp_path


def test_two_runs_that_begin_at_once_get_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with choose_folder(RunConfig()) as first, choose_folder(RunConfig()) as second:
        assert [path.name for path, _ in (first, second)] == ["001", "002"]


def test_a_restart_by_torchrun_resumes_in_the_folder_that_the_launch_began(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-12")
    config, run = RunConfig(out=str(tmp_path / "007")), tmp_path / "007"
    for _ in range(2):  # before the first checkpoint: from the beginning
        with choose_folder(config) as chosen:
            assert chosen == (run, False)
    (run / CHECKPOINTS / "step-00000003").mkdir(parents=True)
    with choose_folder(config) as chosen:
        assert chosen == (run, True)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-13")
    with pytest.raises(TrainError, match="contains a run"), choose_folder(config):
        pass


def resumed(saved, tmp_path, *argv):
    parser = argparse.ArgumentParser()
    add_run_options(parser)
    return resumed_config(parser.parse_args(["--resume", *argv]), tmp_path, saved)


SAVED = RunConfig(
    model=PRESETS["tiny-moe"], batch=6, steps=9, optimizer="muon", data=("/x",), checkpointing=True
)


def test_a_resumed_run_has_its_saved_options_except_given_ones(tmp_path):
    same = dataclasses.replace(SAVED, resume=True, out=str(tmp_path))
    assert resumed(SAVED, tmp_path) == same
    given = ["--steps", "20", "--lr", "0.1", "--no-checkpointing", "--batch", "6", "--preset", "tiny-moe"]
    assert resumed(SAVED, tmp_path, *given) == dataclasses.replace(
        same, steps=20, lr=0.1, checkpointing=False
    )
