"""Metrics reach the trackers of --log-to as they reach the file."""

import importlib
import json
import struct
import sys

import pytest
from torch.distributed.launcher import api as launcher
from train_helpers import tiny, train

from fsdp_runtime.train import Trainer
from fsdp_runtime.train.__main__ import main
from fsdp_runtime.train.report import METRICS, Report, read_metrics
from ragged_shard.testing import run_ranks

STEPS = 3


def logged(folder, out, tracker, **changes):
    """The entries of the metrics file of a run in one process that also logs to a tracker."""
    out.mkdir()
    config = tiny(folder, system="one", steps=STEPS, eval_every=STEPS, log_to=(tracker,), **changes)
    Trainer(config, out, quiet=True).run()
    entries = read_metrics(out / METRICS)
    assert len(entries) == STEPS + 2
    return entries


def losses(entries, kind):
    return [(entry["step"], entry["loss"]) for entry in entries if entry["kind"] == kind]


def test_tensorboard_gets_the_losses_of_the_file(folder, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    entries = logged(folder, tmp_path / "run", "tensorboard")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    for kind in ("train", "held_out"):
        scalars = {event.step: event.value for event in events.Scalars(f"{kind}/loss")}
        assert scalars == pytest.approx(dict(losses(entries, kind)), rel=1e-6)
    assert "train/grad_norm" in events.Tags()["scalars"]


@pytest.mark.long
def test_wandb_gets_the_losses_of_the_file_without_a_network(folder, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    entries = logged(folder, tmp_path / "run", "wandb")
    wandb.teardown()  # its service process has then written all
    [path] = (tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb")
    assert wandb_losses(path, "train") == losses(entries, "train")
    assert wandb_losses(path, "held_out") == losses(entries, "held_out")


def wandb_losses(path, kind):
    """Steps and losses in an offline run's file: 7 bytes, then records in the format of LevelDB's log."""
    record_type = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    data, at, part, pairs = path.read_bytes(), 7, b"", []
    while at < len(data):
        if (left := 2**15 - at % 2**15) < 7:  # of a block, too little for a header
            at += left
            continue
        _, length, kind_of_part = struct.unpack_from("<IHB", data, at)
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind_of_part not in (1, 4):  # whole, last
            continue
        record, part = record_type.FromString(part), b""
        items = {item.nested_key[0] if item.nested_key else item.key: item for item in record.history.item}
        if f"{kind}/loss" in items:
            pairs.append(tuple(json.loads(items[key].value_json) for key in ("_step", f"{kind}/loss")))
    return pairs


@pytest.mark.long
def test_trackio_gets_the_losses_of_the_file_without_a_network(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read on import
    pytest.importorskip("trackio")
    monkeypatch.setenv("WANDB_PROJECT", "tiny")
    entries = logged(folder, tmp_path / "run", "trackio")
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("tiny", "run")
    pairs = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert pairs == losses(entries, "train")


class Full:
    def log(self, step, values):
        raise RuntimeError("the tracker is full")

    def close(self):
        pass


def test_a_sink_that_fails_is_the_problem_of_the_report(tmp_path):
    with Report(tmp_path, 0, 4, quiet=True, sinks=[Full()]) as report:
        report.step({"step": 0, "loss": 1.0})
    assert report.problem == "cannot log metrics to Full: RuntimeError: the tracker is full"
    assert len(read_metrics(tmp_path / METRICS)) == 1


def test_a_missing_package_is_one_line_with_its_command_before_ranks_start(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(launcher, "elastic_launch", None)  # ranks cannot start
    monkeypatch.delenv("RANK", raising=False)
    argv = ["--log-to", "wandb", "--device", "cpu", "--ranks", "2", "--data", str(folder / "text")]
    assert main(argv) == 2
    assert capsys.readouterr().err == (
        "fsdp-train: --log-to wandb: not installed: pip install 'fsdp-runtime[wandb]'\n"
    )


def train_without_wandb(config, out):
    sys.modules["wandb"] = None  # type: ignore[assignment]
    return train(config, out)


def test_a_missing_package_is_the_same_error_on_every_rank(folder, tmp_path):
    messages = run_ranks(2, train_without_wandb, tiny(folder, log_to=("wandb",)), tmp_path / "run")
    assert messages == ["rank 0: --log-to wandb: not installed: pip install 'fsdp-runtime[wandb]'"] * 2


def test_by_default_only_the_file_is_written(folder, tmp_path):
    Trainer(tiny(folder, system="one", steps=2), tmp_path, quiet=True).run()
    assert [path.name for path in tmp_path.iterdir()] == [METRICS]
