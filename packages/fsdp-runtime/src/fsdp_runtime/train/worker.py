"""What every rank runs: through `boot` `run_and_leave`, or through torchrun `run_rank`."""

import contextlib
import dataclasses
import faulthandler
import json
import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from fsdp_runtime import Watchdog

from .agreement import check_options
from .config import RunConfig
from .errors import TrainError, failed_collective, from_all, lost_contact, one_line, say, this_rank
from .hardware import backends, own_device
from .meeting import meet_in_agents_store, outlives_a_start
from .processes import LOST, Failure
from .report import closing_lines
from .stop import StopFlag

USER_ERROR = 2  # exit status
CRASH = 1


def run_rank(
    config: RunConfig, *, quiet: bool = False, control: Path | None = None, stop: StopFlag | None = None
) -> int:
    """Join the other ranks, train, and say what went wrong in one line. Returns the exit status."""
    from .runs import choose_folder
    from .trainer import Trainer

    faulthandler.enable()  # an abort, in a thread of gloo's for example, prints where each thread was
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    stop = stop or StopFlag()
    out: Path | None = None
    reports: list[str] = []
    try:
        with contextlib.ExitStack() as handling:
            if control:
                handling.enter_context(stop.handling())
            config.check(world_size)
            _init_process_group(config, rank, world_size, control)
            if not control:  # torchrun ends ranks that wait for others; while they do, no handler would run
                handling.enter_context(stop.handling())
            check_options(config)
            with choose_folder(config) as folder:
                out = folder.path
                config = dataclasses.replace(config, resume=folder.resume)
                if control and rank == 0:
                    (control / "out").write_text(str(out))
                with _watching(config, rank, world_size, control, reports) as beat:
                    trainer = Trainer(config, out, quiet=quiet, stop=stop, beat=beat)
                    summary: dict[str, Any] = trainer.run()
            if control and rank == 0:
                (control / "summary.json").write_text(json.dumps(summary))
            if not quiet and not control and rank == 0:
                say(closing_lines(summary))
        status = 0
    except Exception as error:
        status = _explain(error, out, rank, control, reports)
    _leave(status)
    return status


def _init_process_group(config: RunConfig, rank: int, world_size: int, control: Path | None) -> None:
    if "RANK" not in os.environ or dist.is_initialized():
        return
    if config.system == "one" and world_size == 1:
        return
    device = own_device(config.device, int(os.environ.get("LOCAL_RANK", 0)))
    where: dict[str, Any] = {"init_method": f"file://{control.absolute() / 'store'}" if control else "env://"}
    if not control and world_size > 1 and outlives_a_start():
        where = {"store": meet_in_agents_store(rank, world_size, config.timeout)}
    dist.init_process_group(
        backends(device),
        **where,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=config.timeout),
    )


@contextlib.contextmanager
def _watching(
    config: RunConfig, rank: int, world_size: int, control: Path | None, reports: list[str]
) -> Iterator[Callable[[str], None]]:
    """A watchdog of this rank, which says on stderr what is late; yields what is told of progress.

    `reports` holds what it said last.

    Collective: one gather of small objects.
    """
    if world_size == 1 or not config.late:
        yield lambda doing: None
        return
    if control:
        store: Store = dist.FileStore(str(control / "watchdog"), world_size)  # type: ignore[attr-defined]
    else:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)  # type: ignore[attr-defined]
    launch = from_all(secrets.token_hex(8))[0]  # restarts use one store, and hosts count them on their own
    prefixed = PrefixStore(f"fsdp-train-watchdog-{launch}", store)

    def report(text: str) -> None:
        reports[:] = [text]
        say(f"fsdp-train: {text}")

    with Watchdog(prefixed, rank, world_size, after=config.late, report=report) as watchdog:
        yield watchdog.beat


def _explain(error: Exception, out: Path | None, rank: int, control: Path | None, reports: list[str]) -> int:
    """Say what went wrong, to the launcher if there is one, else to the terminal. Returns the exit status."""
    at = time.monotonic()
    kind = "lost" if lost_contact(error) else "user" if isinstance(error, TrainError) else "crash"
    text = one_line(error)
    if kind != "user":
        where = failed_collective(error)
        text = f"{this_rank(rank)}: {where and f'{where}: '}{text}{_keep_traceback(out, rank)}"
    if kind == "lost":
        text = "; ".join([text, *reports])  # who was missing
    if control is not None:
        failure = json.dumps(dataclasses.asdict(Failure(at, rank, text, kind)))
        (control / f"failing-{rank}").write_text(failure)
        os.replace(control / f"failing-{rank}", control / f"failed-{rank}.json")
    elif kind != "user" or rank == 0:  # a user error is the same on every rank
        say(f"fsdp-train: {text}")
    return {"user": USER_ERROR, "crash": CRASH, "lost": LOST}[kind]


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


def _leave(status: int) -> None:
    """Take the process group down; after a failure the others may be gone, so do not wait for them."""
    if dist.is_initialized():
        if status == 0:
            dist.barrier()
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def run_and_leave(folder: str) -> None:
    """Run the launch described in a control folder, and end the process."""
    control = Path(folder)
    settings = json.loads((control / "config.json").read_text())
    stop = StopFlag(control / "stop")
    stop.watch(settings["launcher"])
    config = RunConfig.from_json(settings["config"])
    end_process(run_rank(config, quiet=settings["quiet"], control=control, stop=stop))


def end_process(status: int) -> None:
    """End this process at once: threads of gloo, or of a store that is slow, may abort one that takes its time."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)
