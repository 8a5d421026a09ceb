"""Whose folder it is, and what a run that goes on takes from it."""

import argparse
import dataclasses
import subprocess
import sys

import pytest

from fsdp_runtime.train import PRESETS, RunConfig, TrainError
from fsdp_runtime.train.checkpoint import CHECKPOINTS, METADATA, RUN_FILE, name_of
from fsdp_runtime.train.config import add_run_options, resumed_config
from fsdp_runtime.train.runs import choose_folder


def test_a_folder_is_one_runs_at_a_time(tmp_path):
    config = RunConfig(out=str(tmp_path / "run"))
    with (
        choose_folder(config),
        pytest.raises(TrainError, match=r"run is in use by another run"),
        choose_folder(config),
    ):
        pass
    with choose_folder(config) as (again, _):
        assert again.is_dir()


def test_a_run_that_was_killed_holds_no_lock(tmp_path):
    script = (
        "import fcntl, time; f = open('.lock', 'w'); fcntl.flock(f, 2); print(1, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-S", "-c", script], cwd=tmp_path, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with (
            pytest.raises(TrainError, match="in use by another run"),
            choose_folder(RunConfig(out=str(tmp_path))),
        ):
            pass
        holder.kill()
    with choose_folder(RunConfig(out=str(tmp_path))):
        pass


def test_two_runs_that_begin_at_once_get_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with choose_folder(RunConfig()) as first, choose_folder(RunConfig()) as second:
        assert [path.name for path, _ in (first, second)] == ["001", "002"]


def save_in(run):
    checkpoint = run / CHECKPOINTS / name_of(3)
    checkpoint.mkdir(parents=True)
    for name in (METADATA, RUN_FILE):
        (checkpoint / name).touch()


@pytest.mark.parametrize("out", ["runs/007", None])
def test_a_restart_by_torchrun_goes_on_in_the_folder_that_the_launch_began(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-12")
    with choose_folder(RunConfig(out=out)) as (begun, resume):
        assert not resume
    with choose_folder(RunConfig(out=out)) as again:  # before the first checkpoint: from the beginning
        assert again == (begun, False)
    save_in(begun)
    with choose_folder(RunConfig(out=out)) as again:
        assert again == (begun, True)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-13")
    if out:
        with pytest.raises(TrainError, match="holds a run already"), choose_folder(RunConfig(out=out)):
            pass
    else:
        with choose_folder(RunConfig()) as (other, resume):
            assert (other.name, resume) == ("002", False)


def resumed(saved, tmp_path, *argv):
    parser = argparse.ArgumentParser()
    add_run_options(parser)
    return resumed_config(parser.parse_args(["--resume", *argv]), tmp_path, saved)


SAVED = RunConfig(
    model=PRESETS["tiny-moe"], batch=6, steps=9, optimizer="muon", data=("/x",), checkpointing=True
)


def test_a_resumed_run_has_its_own_options_but_for_those_that_are_given(tmp_path):
    same = dataclasses.replace(SAVED, resume=True, out=str(tmp_path))
    assert resumed(SAVED, tmp_path) == same
    given = ["--steps", "20", "--lr", "0.1", "--no-checkpointing", "--batch", "6", "--preset", "tiny-moe"]
    assert resumed(SAVED, tmp_path, *given) == dataclasses.replace(
        same, steps=20, lr=0.1, checkpointing=False
    )


def test_a_resumed_run_cannot_have_another_hf_config(tmp_path):
    with pytest.raises(TrainError, match=r"--hf-config /a.json: the run in .* has None"):
        resumed(SAVED, tmp_path, "--hf-config", "/a.json")
