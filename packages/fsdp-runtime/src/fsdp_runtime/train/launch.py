"""Starts ranks on this machine with torch elastic; the program of a rank; one line for a failure.

    fsdp-train (plain) -> start_ranks -> elastic agent -> `python -m fsdp_runtime.train` in every rank -> run_rank
    torchrun           -> fsdp-train in every rank                                                     -> run_rank

Elastic's agent forwards SIGINT, SIGTERM and SIGHUP to the ranks, which save and leave.
"""

import contextlib
import ctypes
import dataclasses
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fsdp_runtime._torch_compat import flight_recorders
from ragged_shard.device import is_cpu
from ragged_shard.dist import installed_versions

from .checkpoint import choose_folder
from .config import RunConfig, flag_of
from .errors import TrainError, check_agreement, lost_contact, one_line, say
from .hardware import backends, own_device, pick_device
from .report import closing_lines
from .trainer import Trainer

LAUNCHED = "FSDP_TRAIN_LAUNCHED"  # variable with the run, for ranks of `start_ranks`
# All of them decide what ranks compute or how it is laid out.
_PACKAGES = ("torch", "layout-planner", "ragged-shard", "dbuffer", "block-optim", "fsdp-runtime")
_PR_SET_PDEATHSIG = 1


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def pick_ranks(config: RunConfig, asked: int | None) -> int:
    """Local ranks of a run: `asked`, or the largest number that the machine has and that the batch allows."""
    gpus = 0 if is_cpu(pick_device(config.device)) else torch.accelerator.device_count()
    if asked is not None and 0 < gpus < asked:
        raise TrainError(f"--ranks {asked}: there are {gpus} GPUs")
    if asked is not None:
        return asked
    if config.system == "one":
        return 1
    return max((n for n in range(1, (gpus or num_cores()) + 1) if config.divides(n)), default=1)


def start_ranks(config: RunConfig, ranks: int, *, quiet: bool = False) -> int:
    """Run `config` on `ranks` local ranks and wait; returns 0, or 128 + n if signal n to a rank stopped the run.

    Raises `TrainError` if the run failed, with the rank that failed first, and how; elastic's `SignalException` if this
    process received a signal, when the ranks have saved and left.
    """
    handled = [number.name for number in (*_stop_signals(), signal.SIGQUIT)]
    run = {"config": config.to_json(), "quiet": quiet, "launcher": os.getpid()}
    variables = {
        "OMP_NUM_THREADS": str(max(1, num_cores() // ranks)),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # malloc uses huge pages
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    added = {LAUNCHED: json.dumps(run)} | {k: v for k, v in variables.items() if not os.environ.get(k)}
    logs = logging.root.manager.disable
    os.environ.update(added)
    logging.disable(logging.ERROR)  # the agent logs the failure that is raised below
    try:
        with tempfile.TemporaryDirectory(prefix="fsdp-train-") as folder:
            launch = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=ranks,
                run_id=Path(folder).name,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                local_addr="localhost",
                max_restarts=0,
                logs_specs=DefaultLogsSpecs(log_dir=folder),
                signals_to_handle=",".join(handled),
            )
            launch.numa_options = None  # no binding, also if there is a GPU for each rank
            launch.shutdown_timeout = max(1, int(config.timeout))  # after a signal, until ranks have saved
            # -P: do not import modules from the working directory
            elastic_launch(launch, sys.executable)("-P", "-m", "fsdp_runtime.train")
    except ChildFailedError as error:
        rank, failure = _first_failure(error)
        if failure.exitcode > 128:
            return failure.exitcode
        raise TrainError(_describe(rank, failure)) from None
    finally:
        logging.disable(logs)
        for name in added:
            del os.environ[name]
    return 0


def _first_failure(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The rank that failed first, and how: not one that has lost contact to it, if the agent has seen both at once.

    A rank that failed later, such as one that was frozen, was ended by the agent.
    """
    first = min(failure.timestamp for failure in error.failures.values())
    at_once = {
        rank: each for rank, each in error.failures.items() if each.timestamp <= first + 1
    }  # whole seconds
    causes = {rank: each for rank, each in at_once.items() if not _has_lost_contact(each)}
    return min((causes or at_once).items(), key=lambda each: each[1].timestamp)


def _has_lost_contact(failure: ProcessFailure) -> bool:
    message: Any = failure.message
    return isinstance(message, dict) and str(message["message"]).startswith(LostRankError.__name__)


def _describe(rank: int, failure: ProcessFailure) -> str:
    """The failure of a rank as one line."""
    message: Any = failure.message
    if isinstance(message, dict):  # an error file: "ExceptionType: text"
        return str(message["message"]).partition(": ")[2]
    if failure.exitcode >= 0:
        return f"rank {rank} ended with status {failure.exitcode}"
    name = failure.signal_name()
    sender = ", which the kernel sends too when memory runs out (then `dmesg` has it)"
    return f"rank {rank} was ended by {name}" + (sender if name == "SIGKILL" else "")


class RankError(Exception):
    """An unexpected exception of a rank, as one line that names the rank."""


class LostRankError(RankError):
    """A rank has lost contact to another one, where the cause is."""


def _stop_signals() -> list[signal.Signals]:
    """Signals that stop a run. A SIGHUP that is ignored (nohup) stays ignored."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


def rank_status(config: RunConfig | None) -> int:
    """Run this rank, with the launcher's run if `config` is None; returns its exit status. Prints under torchrun."""
    run: dict[str, Any] = {"quiet": False}
    if config is None:
        run = json.loads(os.environ[LAUNCHED])
        config = RunConfig.from_json(run["config"])
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)  # if the launcher dies
        if os.getppid() != run["launcher"]:  # it has died already
            return 128 + signal.SIGTERM
    try:
        return run_rank(config, quiet=run["quiet"]) or 0
    except (TrainError, RankError) as error:
        user = isinstance(error, TrainError)
        if LAUNCHED not in os.environ and (not user or os.environ.get("RANK", "0") == "0"):
            say(f"fsdp-train: {one_line(error) if user else error}")
        return 2 if user else 1


@record  # writes elastic's error file
def run_rank(config: RunConfig, *, quiet: bool = False) -> int:
    """Join the other ranks and train; returns 0, or 128 + n if signal n stopped the run.

    Raises `TrainError`, the same on all ranks, or `RankError` for anything else.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    received: list[int] = []
    folder: Path | None = None
    try:
        config.check(world_size)
        if "RANK" in os.environ and config.system != "one" and not dist.is_initialized():
            device = own_device(config.device, int(os.environ.get("LOCAL_RANK", 0)))
            dist.init_process_group(backends(device), timeout=timedelta(seconds=config.timeout))
        # Handlers come after set-up: a rank that waits for others in C++ would not run them, so a signal ends it.
        for number in _stop_signals():
            signal.signal(number, lambda number, frame: received.append(number))
        check_options(config)
        with choose_folder(config) as (out, resume):
            config, folder = dataclasses.replace(config, resume=resume), out
            summary = Trainer(config, out, quiet=quiet, stop=lambda: sum(received[:1])).run()
        if not quiet and rank == 0:
            say(closing_lines(summary))
        if dist.is_initialized():
            dist.barrier()  # else a rank that leaves early is taken for a lost one
    except Exception as error:
        lost = lost_contact(error)
        if isinstance(error, TrainError) and not lost:
            raise
        text = f"rank {rank} ({socket.gethostname()}): {one_line(error)}"
        if lost:
            raise LostRankError(text + _keep_flight_recorder(folder, rank)) from error
        say(traceback.format_exc())
        raise RankError(text) from error
    with contextlib.suppress(Exception):  # there may be none
        dist.destroy_process_group()
    return 128 + summary["stopped_by"] if summary["stopped"] else 0


def check_options(config: RunConfig) -> None:
    """Raise `TrainError`, on every rank, if options or versions differ between ranks.

    Paths may differ between machines, and rank 0 chooses the folder.
    """
    own = ("out", "data", "held_out")
    options = {flag_of(name): v for name, v in config.to_json().items() if name not in own}
    check_agreement({**options, **installed_versions(*_PACKAGES)})


def _keep_flight_recorder(out: Path | None, rank: int) -> str:
    """Write torch's record of this rank's last collectives; what an error says of it."""
    trace = flight_recorders()
    if out is None or not trace:
        return ""
    path = out / f"flight-recorder-rank-{rank}.json"
    try:
        path.write_text(json.dumps(trace))
    except OSError as error:
        return f"; its last collectives cannot be written: {error}"
    return f"; its last collectives: {path}"


def end_process(status: int) -> None:
    """End this process without finalizing it: a thread of gloo or of a slow store may abort meanwhile."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)
