"""Starts ranks on this machine with torch elastic; the program of a rank; and how a failure becomes one line.

    fsdp-train (plain) -> start_ranks -> elastic agent -> `python -m fsdp_runtime.train.launch FOLDER` for every rank
    torchrun           -> fsdp-train in every rank -> run_rank

FOLDER is the control folder of one launch. ``config.json`` goes in; ``out`` (the run's folder) and ``summary.json``
come out, and elastic's error files are in it. A file ``stop`` tells the ranks to save and leave.
"""

import contextlib
import ctypes
import dataclasses
import hashlib
import json
import logging
import os
import secrets
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record

from fsdp_runtime import Watchdog
from ragged_shard.device import is_cpu
from ragged_shard.dist import gather_from_ranks, installed_versions

from .checkpoint import latest
from .config import RunConfig
from .errors import (
    TrainError,
    check_agreement,
    lost_contact,
    one_line,
    say,
    this_rank,
)
from .hardware import backends, own_device, pick_device
from .report import closing_lines

USER_ERROR, CRASH = 2, 1  # exit statuses
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE = 5.0  # seconds a rank that lost contact waits, so that the agent sees the rank that died first
_PR_SET_PDEATHSIG = 1


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def pick_ranks(config: RunConfig, asked: int | None) -> int:
    """Local ranks of a run: `asked`, or the largest number that the machine has and that the batch allows."""
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


def start_ranks(config: RunConfig, ranks: int, *, quiet: bool = False) -> dict[str, Any]:
    """Run `config` on `ranks` local ranks and wait; returns the summary of the run.

    SIGINT, SIGTERM and SIGHUP tell the ranks to save and leave; a second SIGINT ends them.

    Raises:
        TrainError: the run failed; names the rank that failed first, and how.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        Path(name, "stop").touch()
        if received.count(signal.SIGINT) > 1:
            raise KeyboardInterrupt

    with tempfile.TemporaryDirectory(prefix="fsdp-train-") as name, on_stop_signals(on_signal):
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
        launch.numa_options = None  # no binding, also if there is a GPU for each rank
        try:
            with _environment(ranks), _quiet_agent():
                # -P: do not import modules from the working directory
                elastic_launch(launch, sys.executable)("-P", "-m", "fsdp_runtime.train.launch", name)
        except ChildFailedError as error:
            raise TrainError(_describe(*error.get_first_failure(), control)) from None
        summary: dict[str, Any] = json.loads((control / "summary.json").read_text())
        return summary | ({"stopped_by": received[0]} if received else {})


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


# Rank 0 chooses the folder; paths may differ between machines: what is in the files is compared.
_OWN = ("out", "data", "held_out", "hf_config")


class RankError(Exception):
    """An unexpected exception of a rank, as one line that names the rank."""


@dataclass
class StopFlag:
    """Tells the training loop to stop; `received` is the signal's number, 0 for none."""

    stop_file: Path | None = None
    received: int = 0

    def __call__(self) -> int:
        """Look for the stop file, and return the signal."""
        if not self.received and self.stop_file is not None and self.stop_file.exists():
            self.received = signal.SIGTERM
        return self.received

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Record a signal."""
        self.received = number


@contextlib.contextmanager
def on_stop_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside, `handler` is called for SIGINT, SIGTERM and SIGHUP. A SIGHUP that is ignored (nohup) stays ignored."""
    numbers = [
        number
        for number in STOP_SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@record  # writes elastic's error file
def run_rank(config: RunConfig, *, quiet: bool = False, control: Path | None = None) -> None:
    """Join the other ranks and train.

    Args:
        config: the run.
        quiet: print nothing.
        control: the launch's control folder; None under torchrun.

    Raises:
        TrainError: the same on all ranks.
        RankError: anything else, as one line.
    """
    from .runs import choose_folder
    from .trainer import Trainer

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    stop = StopFlag(control / "stop" if control else None)
    out: Path | None = None
    reports: list[str] = []
    try:
        config.check(world_size)
        _init_process_group(config, world_size)
        # Handlers come after set-up: a rank that waits for others in C++ would not run them, so a signal ends it.
        with on_stop_signals(stop.receive):
            check_options(config)
            with choose_folder(config) as (out, resume):
                config = dataclasses.replace(config, resume=resume)
                if control and rank == 0:
                    (control / "out").write_text(str(out))
                with _watching(config, rank, world_size, reports, out) as beat:
                    summary = Trainer(config, out, quiet=quiet, stop=stop, beat=beat).run()
        if control and rank == 0:
            (control / "summary.json").write_text(json.dumps(summary))
        if not quiet and not control and rank == 0:
            say(closing_lines(summary))
        if dist.is_initialized():
            dist.barrier()  # else a rank that leaves early is taken for a lost one
    except Exception as error:
        lost = lost_contact(error)
        if isinstance(error, TrainError) and not lost:
            raise
        text = f"{this_rank(rank)}: {one_line(error)}{_keep_traceback(out, rank)}"
        text = "; ".join([text, *(reports if lost else [])])  # of the watchdog
        if lost:
            time.sleep(_GRACE)
        raise RankError(text) from error
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def check_options(config: RunConfig) -> None:
    """`check_agreement` on options and versions.

    Raises:
        TrainError: they differ.
    """
    options = {f"--{name.replace('_', '-')}": v for name, v in config.to_json().items() if name not in _OWN}
    path = Path(config.hf_config) if config.hf_config else None
    model = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path and path.is_file() else None
    versions = installed_versions("torch", "fsdp-runtime", "block-optim", "transformers")
    check_agreement({**options, "the content of --hf-config": model, **versions})


def _init_process_group(config: RunConfig, world_size: int) -> None:
    if "RANK" not in os.environ or dist.is_initialized():
        return
    if config.system == "one" and world_size == 1:
        return
    device = own_device(config.device, int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group(backends(device), timeout=timedelta(seconds=config.timeout))


@contextlib.contextmanager
def _watching(
    config: RunConfig, rank: int, world_size: int, reports: list[str], out: Path
) -> Iterator[Callable[[str], None]]:
    """Run a watchdog that prints late collectives to stderr; yields its `beat`.

    `reports` holds its last report; flight recorders are written into `out`.

    Collective: one gather of small objects.
    """
    if world_size == 1 or not config.late:
        yield lambda doing: None
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store: Store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=config.timeout))  # type: ignore[attr-defined]
    launch = gather_from_ranks(secrets.token_hex(8))[0]  # restarts use the same store
    prefixed = PrefixStore(f"fsdp-train-watchdog-{launch}", store)

    def report(text: str) -> None:
        reports[:] = [text]
        say(f"fsdp-train: {text}")

    with Watchdog(prefixed, rank, world_size, after=config.late, report=report, folder=out) as watchdog:
        yield watchdog.beat


def _keep_traceback(out: Path | None, rank: int) -> str:
    text = traceback.format_exc()
    if out is None:
        say(text)
        return ""
    path = out / f"traceback-rank-{rank}.txt"
    with contextlib.suppress(OSError):
        out.mkdir(parents=True, exist_ok=True)  # a start that failed has removed it
        path.write_text(text)
        return f" (traceback in {path})"
    return ""


def status_of(run: Callable[[], None], *, prints: bool) -> int:
    """Call `run` and return the exit status. With `prints`, print an error; one of the user's on rank 0 only."""
    try:
        run()
    except (TrainError, RankError) as error:
        user = isinstance(error, TrainError)
        if prints and (not user or os.environ.get("RANK", "0") == "0"):
            say(f"fsdp-train: {one_line(error) if user else error}")
        return USER_ERROR if user else CRASH
    return 0


def main(folder: str) -> None:
    """Run the launch described in a control folder, and end the process. SIGTERM arrives if the launcher dies."""
    control = Path(folder)
    settings = json.loads((control / "config.json").read_text())
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != settings["launcher"]:  # it has died already
        end_process(128 + signal.SIGTERM)
    config = RunConfig.from_json(settings["config"])
    end_process(status_of(lambda: run_rank(config, quiet=settings["quiet"], control=control), prints=False))


def end_process(status: int) -> None:
    """End this process without finalizing it: a thread of gloo or of a slow store may abort meanwhile."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1])
