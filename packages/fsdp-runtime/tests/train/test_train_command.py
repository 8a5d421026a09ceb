"""The command itself, with ranks of its own."""

import importlib.util
import re
import signal
import subprocess
import sys

import pytest
import torch
from train_helpers import losses, wait_for

from fsdp_runtime.train.__main__ import main
from fsdp_runtime.train.checkpoint import latest
from fsdp_runtime.train.report import read_metrics


@pytest.mark.long
def test_ctrl_c_saves_and_says_how_to_resume(folder, started):
    running = started("stopped")
    wait_for(lambda: len(read_metrics(folder / "stopped" / "metrics.jsonl")) >= 3, running)
    running.send_signal(signal.SIGINT)
    said = running.communicate(timeout=60)[1]
    assert running.returncode == 130, said
    last = said.strip().splitlines()[-1]
    found = re.match(r"stopped after step (\d+), saved in stopped; resume with: fsdp-train .*--resume", last)
    assert found
    assert "Traceback" not in said
    steps = int(found[1])
    assert latest(folder / "stopped").name == f"step-{steps:08d}"
    assert max(losses(folder / "stopped")) == steps - 1
    options = ["--resume", "--out", "stopped", "--ranks", "3", "--steps", str(steps + 2)]
    command = [sys.executable, "-m", "fsdp_runtime.train", *options]  # sizes, batch and data are the run's
    assert subprocess.run(command, cwd=folder, timeout=120, check=False).returncode == 0
    assert max(losses(folder / "stopped")) == steps + 1


@pytest.mark.long
def test_a_run_ends_with_a_plot_metrics_and_a_checkpoint(folder, started):
    running = started("whole", "--steps", "4", "--eval-every", "2")
    said = running.communicate(timeout=120)[1]
    assert running.returncode == 0, said
    assert "4 steps in" in said.splitlines()[-2]
    assert (folder / "whole" / "curves.png").read_bytes()[:4] == b"\x89PNG"
    kinds = [entry["kind"] for entry in read_metrics(folder / "whole" / "metrics.jsonl")]
    assert kinds.count("held_out") == 3
    again = started("whole")
    assert again.communicate(timeout=120)[1].strip().endswith("give another folder")
    assert again.returncode == 2


@pytest.mark.long
def test_an_error_of_a_rank_is_one_line_from_the_command(folder, started):
    running = started("new/runs/first", "--held-out", "nowhere")
    said = running.communicate(timeout=120)[1]
    assert said.startswith(f"fsdp-train: no data: '{folder}/nowhere' matches no file")
    assert said.count("\n") == 1
    assert running.returncode == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", [[], ["plan"], ["compare"]])
def test_a_cuda_device_that_is_not_there_is_one_line(command, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert main([*command, "--device", "cuda", "--ranks", "2"]) == 2
    assert capsys.readouterr().err == "fsdp-train: --device cuda: this machine has auto, cpu\n"


@pytest.mark.parametrize("command", [[], ["compare"]])
def test_only_a_run_that_draws_needs_matplotlib(command, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    wrong = [*command, "--ranks", "1", "--lr", "-1"]  # found after
    assert main(wrong) == 2
    assert "pip install matplotlib, or add --no-plot" in capsys.readouterr().err
    assert main([*wrong, "--no-plot"]) == 2
    assert "--lr -1.0: expected a positive number" in capsys.readouterr().err
    assert main(["plan", "--ranks", "1"]) == 0
