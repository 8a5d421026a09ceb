"""The program of a rank: `main` for ranks started by `launch`, `run_rank` for those of torchrun."""

import contextlib
import ctypes
import dataclasses
import json
import os
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing.errors import record

from fsdp_runtime import Watchdog

from .agreement import check_options
from .config import RunConfig
from .errors import TrainError, failed_collective, from_all, lost_contact, one_line, say, this_rank
from .hardware import backends, own_device
from .report import closing_lines

USER_ERROR, CRASH = 2, 1  # exit statuses
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE = 5.0  # seconds a rank that lost contact waits, so that the agent sees the rank that died first
_PR_SET_PDEATHSIG = 1


class RankError(Exception):
    """An unexpected exception of a rank, as one line that names the rank."""


@dataclass
class StopFlag:
    """Whether this rank should stop; `received` is the signal's number, 0 for none."""

    stop_file: Path | None = None
    received: int = 0

    def __call__(self) -> int:
        """Look for the stop file, and return the signal."""
        if not self.received and self.stop_file is not None and self.stop_file.exists():
            self.received = signal.SIGTERM
        return self.received

    @contextlib.contextmanager
    def handling(self) -> Iterator[None]:
        """Record SIGINT, SIGTERM and SIGHUP inside."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            self.received = number

        with on_stop_signals(on_signal):
            yield


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
        _init_process_group(config, rank, world_size)
        # Handlers come after set-up: a rank that waits for others in C++ would not run them, so a signal ends it.
        with stop.handling():
            check_options(config)
            with choose_folder(config) as folder:
                out = folder.path
                config = dataclasses.replace(config, resume=folder.resume)
                if control and rank == 0:
                    (control / "out").write_text(str(out))
                with _watching(config, rank, world_size, reports) as beat:
                    summary = Trainer(config, out, quiet=quiet, stop=stop, beat=beat).run()
        if control and rank == 0:
            (control / "summary.json").write_text(json.dumps(summary))
        if not quiet and not control and rank == 0:
            say(closing_lines(summary))
    except Exception as error:
        lost = lost_contact(error)
        if isinstance(error, TrainError) and not lost:
            raise
        text = _describe(error, rank, out, reports if lost else [])
        if lost:
            time.sleep(_GRACE)
        raise RankError(text) from error
    if dist.is_initialized():
        dist.barrier()
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _init_process_group(config: RunConfig, rank: int, world_size: int) -> None:
    if "RANK" not in os.environ or dist.is_initialized():
        return
    if config.system == "one" and world_size == 1:
        return
    device = own_device(config.device, int(os.environ.get("LOCAL_RANK", 0)))
    allowed = timedelta(seconds=config.timeout)
    dist.init_process_group(backends(device), rank=rank, world_size=world_size, timeout=allowed)


@contextlib.contextmanager
def _watching(
    config: RunConfig, rank: int, world_size: int, reports: list[str]
) -> Iterator[Callable[[str], None]]:
    """Run a watchdog that prints late collectives to stderr; yields its `beat`.

    `reports` holds its last report.

    Collective: one gather of small objects.
    """
    if world_size == 1 or not config.late:
        yield lambda doing: None
        return
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)  # type: ignore[attr-defined]
    launch = from_all(secrets.token_hex(8))[0]  # restarts use the same store
    prefixed = PrefixStore(f"fsdp-train-watchdog-{launch}", store)

    def report(text: str) -> None:
        reports[:] = [text]
        say(f"fsdp-train: {text}")

    with Watchdog(prefixed, rank, world_size, after=config.late, report=report) as watchdog:
        yield watchdog.beat


def _describe(error: Exception, rank: int, out: Path | None, reports: list[str]) -> str:
    """An unexpected exception as one line: rank, collective, exception, traceback file, the watchdog's reports."""
    where = failed_collective(error)
    text = f"{this_rank(rank)}: {where and f'{where}: '}{one_line(error)}{_keep_traceback(out, rank)}"
    return "; ".join([text, *reports])


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
