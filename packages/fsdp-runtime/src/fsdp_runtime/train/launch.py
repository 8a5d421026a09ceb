"""Starts ranks on this machine, and turns what comes back into one line.

    fsdp-train (plain) -> start_ranks -> `python boot.py FOLDER LAUNCHER` for every rank

FOLDER is the control folder of one launch. ``config.json`` goes in; ``out`` (the run's folder), ``failed-RANK.json``
(what went wrong there) and ``summary.json`` come out; a file ``stop`` asks the ranks to save and leave. The ranks meet
in ``store``, a file too: nothing that they need is in the launcher.
"""

import json
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

from .checkpoint import latest
from .config import RunConfig
from .errors import TrainError
from .hardware import pick_device
from .processes import Failure, Processes, cause
from .stop import on_stop_signals


@dataclass(frozen=True)
class Finished:
    """What a launch came to: the summary of its run, and the signal that ended it early, if one did."""

    summary: dict[str, Any]
    stopped_by: int | None


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def pick_ranks(config: RunConfig, asked: int | None) -> int:
    """Local ranks of a run: what was asked for, else the most that the machine has and splits and batch divide."""
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

    SIGINT, SIGTERM and SIGHUP ask the ranks to save and leave; a second SIGINT ends them.

    Raises:
        TrainError: the run failed; with what the ranks said, or which of them died first and how.
    """
    with tempfile.TemporaryDirectory(prefix="fsdp-train-") as name:
        control = Path(name)
        settings = {"config": config.to_json(), "quiet": quiet, "launcher": os.getpid()}
        (control / "config.json").write_text(json.dumps(settings))
        # -P: this folder, where the script is, is not one to import from
        command = [sys.executable, "-P", str(Path(__file__).with_name("boot.py")), name, str(os.getpid())]
        with _asks_to_stop(control) as received:
            processes = Processes([command] * ranks, [_environment(rank, ranks) for rank in range(ranks)])
            try:
                outcome = processes.wait()
            finally:
                processes.kill()
        failures = [Failure(**json.loads(path.read_text())) for path in control.glob("failed-*.json")]
        failed = cause(outcome, failures)
        if failed is not None:
            raise TrainError(failed.text + ("" if failed.kind == "user" else _what_is_left(control)))
        summary = json.loads((control / "summary.json").read_text())
        return Finished(summary, received[0] if received else summary["stopped_by"])


def _environment(rank: int, ranks: int) -> dict[str, str]:
    """As torchrun sets it, but for the address of its store; glibc's malloc is to ask for huge pages."""
    mine = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {
        **os.environ,
        **{name: str(value) for name, value in mine.items()},
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, num_cores() // ranks)),
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES") or "glibc.malloc.hugetlb=1",
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }


def _what_is_left(control: Path) -> str:
    """How to go on after a failure, if there is a checkpoint to go on from."""
    named = control / "out"
    out = Path(named.read_text()) if named.exists() else None
    newest = latest(out) if out else None
    return f"; {newest} stays, go on with: fsdp-train --resume --out {out}" if newest else ""


@contextmanager
def _asks_to_stop(control: Path) -> Iterator[list[int]]:
    """Inside, SIGINT, SIGTERM and SIGHUP write the control folder's ``stop``; the signals received, in order."""
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        (control / "stop").touch()
        if received.count(signal.SIGINT) > 1:
            raise KeyboardInterrupt

    with on_stop_signals(on_signal):
        yield received
