"""Starts ranks through torchrun's own launcher, and turns what comes back into one line.

    fsdp-train (plain) -> start_ranks -> torchrun's agent -> `python -m fsdp_runtime.train.worker FOLDER` on every rank

FOLDER is the control folder of one launch: ``config.json`` goes in, ``message`` (what went wrong, if a rank could
say it), ``stopped`` and ``summary.json`` come out; a file ``stop`` asks the ranks to save and leave.
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

from ragged_shard import is_cpu

from .config import RunConfig
from .errors import TrainError
from .hardware import pick_device


@dataclass(frozen=True)
class Finished:
    """What a launch came to: the summary of its run, and the signal that ended it early, if one did."""

    summary: dict[str, Any]
    stopped_by: int | None


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def pick_ranks(config: RunConfig, asked: int | None) -> int:
    """Local ranks of a run: what was asked for, else the most that GPUs or cores allow and the batch divides by."""
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
    return max(n for n in range(1, max(1, most) + 1) if n == 1 or config.batch % (n * config.accumulate) == 0)


def start_ranks(config: RunConfig, ranks: int, *, quiet: bool = False) -> Finished:
    """Run `config` on `ranks` local ranks and wait.

    SIGINT and SIGTERM ask the ranks to save and leave; a second SIGINT ends them.

    Raises:
        TrainError: the run failed; with what the ranks said, or which of them died and how.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="fsdp-train-") as name:
        control = Path(name)
        (control / "config.json").write_text(json.dumps({**config.to_json(), "quiet": quiet}))
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=control.name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.05,
            signals_to_handle="SIGHUP,SIGQUIT",
        )
        environment = {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, num_cores() // ranks)),
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        }
        command = ["-m", "fsdp_runtime.train.worker", str(control)]
        with _environment(environment), _asks_to_stop(control) as received:
            try:
                elastic_launch(settings, sys.executable)(*command)
            except ChildFailedError as error:
                raise TrainError(_reason(control, error.failures)) from error
        summary = control / "summary.json"
        found = json.loads(summary.read_text()) if summary.exists() else {}
        return Finished(found, received[0] if received else found.get("stopped_by"))


def _reason(control: Path, failures: dict[int, Any]) -> str:
    """What to say of a failed launch: the ranks' own message, else who died and how."""
    message = control / "message"
    if message.exists():
        return message.read_text()
    rank, failure = min(failures.items(), key=lambda item: (item[1].timestamp, item[0]))
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"rank {rank} was ended by {name}{hint}; the newest checkpoint stays, --resume goes on from it"
    return f"rank {rank} ended with status {failure.exitcode}"


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _asks_to_stop(control: Path) -> Iterator[list[int]]:
    """Inside, SIGINT and SIGTERM write the control folder's ``stop``; the signals received, in order."""
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        (control / "stop").touch()
        if received.count(signal.SIGINT) > 1:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
