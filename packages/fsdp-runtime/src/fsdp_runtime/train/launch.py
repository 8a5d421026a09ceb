"""Starts ranks on this machine with torch elastic, and reports a failure as one line.

    fsdp-train (plain) -> start_ranks -> elastic agent -> `python -m fsdp_runtime.train.worker FOLDER` for every rank

FOLDER is the control folder of one launch. ``config.json`` goes in; ``out`` (the run's folder) and ``summary.json``
come out, and elastic's error files are in it. A file ``stop`` tells the ranks to save and leave.
"""

import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ragged_shard import is_cpu

from .checkpoint import latest
from .config import RunConfig
from .errors import TrainError
from .hardware import pick_device
from .worker import on_stop_signals


@dataclass(frozen=True)
class Finished:
    """Result of a launch: the summary of its run, and the signal that ended it early, if any."""

    summary: dict[str, Any]
    stopped_by: int | None


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def pick_ranks(config: RunConfig, asked: int | None) -> int:
    """Local ranks of a run: `asked`, or the largest number that the machine has and that the splits and batch allow."""
    device = pick_device(config.device)
    if asked is not None:
        if asked < 1:
            raise TrainError(f"--ranks {asked}: expected at least 1")
        if not is_cpu(device) and asked > torch.accelerator.device_count():
            raise TrainError(f"--ranks {asked}: there are {torch.accelerator.device_count()} GPUs")
        return asked
    if config.system == "one":
        return 1
    most = num_cores() if is_cpu(device) else torch.accelerator.device_count()
    return max((n for n in range(1, max(1, most) + 1) if config.divides(n)), default=1)


def start_ranks(config: RunConfig, ranks: int, *, quiet: bool = False) -> Finished:
    """Run `config` on `ranks` local ranks and wait.

    SIGINT, SIGTERM and SIGHUP tell the ranks to save and leave; a second SIGINT ends them.

    Raises:
        TrainError: the run failed; names the rank that failed first, and how.
    """
    with tempfile.TemporaryDirectory(prefix="fsdp-train-") as name, _stop_file(Path(name)) as received:
        control = Path(name)
        settings = {"config": config.to_json(), "quiet": quiet, "launcher": os.getpid()}
        (control / "config.json").write_text(json.dumps(settings))
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=control.name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=name),
            signals_to_handle="SIGQUIT",  # the others are handled here: ranks save first
        )
        try:
            with _environment(ranks), _quiet_agent():
                # -P: do not import modules from the working directory
                elastic_launch(launch, sys.executable)("-P", "-m", "fsdp_runtime.train.worker", name)
        except ChildFailedError as error:
            raise TrainError(_describe(*error.get_first_failure(), control)) from None
        summary = json.loads((control / "summary.json").read_text())
        return Finished(summary, received[0] if received else summary["stopped_by"])


@contextmanager
def _environment(ranks: int) -> Iterator[None]:
    """Set variables of the ranks inside, unless the user has; with GLIBC_TUNABLES glibc's malloc uses huge pages."""
    defaults = {
        "OMP_NUM_THREADS": str(max(1, num_cores() // ranks)),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    added = [name for name in defaults if not os.environ.get(name)]
    os.environ.update({name: defaults[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _describe(rank: int, failure: ProcessFailure, control: Path) -> str:
    """The failure of a rank as one line, with the command that resumes from the newest checkpoint."""
    message: Any = failure.message
    if isinstance(message, dict):  # an error file: "ExceptionType: text"
        kind, _, text = str(message["message"]).partition(": ")
        if kind == TrainError.__name__:
            return text
    elif failure.exitcode < 0:
        name = failure.signal_name()
        text = f"rank {rank} was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    else:
        text = f"rank {rank} ended with status {failure.exitcode}"
    out = control / "out"
    run = Path(out.read_text()) if out.exists() else None
    newest = latest(run) if run else None
    return text + (f"; {newest} stays, go on with: fsdp-train --resume --out {run}" if newest else "")


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Turn off logging inside: the agent logs what `_describe` reports."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _stop_file(control: Path) -> Iterator[list[int]]:
    """Inside, SIGINT, SIGTERM and SIGHUP write the control folder's ``stop``. Yields the signals received, in order."""
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        (control / "stop").touch()
        if received.count(signal.SIGINT) > 1:
            raise KeyboardInterrupt

    with on_stop_signals(on_signal):
        yield received
