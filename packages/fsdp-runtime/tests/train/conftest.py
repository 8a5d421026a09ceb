"""A folder with text; the command."""

import os
import signal
import subprocess
import sys

import pytest
from train_helpers import TINY, text_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("runs")
    text_folder(made)
    return made


@pytest.fixture
def started(folder):
    """Starts a launch that only ends when it is told to; what a test leaves running is killed after it."""
    running = []

    def start(out, *options):
        command = [sys.executable, "-m", "fsdp_runtime.train", "--ranks", "2", *TINY, "--out", out]
        running.append(
            subprocess.Popen(
                [*command, "--steps", "100000", "--eval-every", "0", "--data", "text", *options],
                cwd=folder, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # else nohup's holds
            )
        )  # fmt: skip
        return running[-1]

    yield start
    for process in running:
        process.kill()
