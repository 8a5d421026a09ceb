"""What every rank runs: ``python -m fsdp_runtime.train.worker CONTROL_FOLDER``, or through torchrun `run_rank`."""

import contextlib
import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .config import RunConfig
from .errors import TrainError, one_line
from .hardware import backends, own_device
from .report import closing_lines

USER_ERROR = 2  # exit status
CRASH = 1


def run_rank(config: RunConfig, *, quiet: bool = False, control: Path | None = None) -> int:
    """Join the other ranks, train, and say what went wrong in one line. Returns the exit status."""
    from .runs import choose_folder
    from .trainer import StopFlag, Trainer

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    stop = StopFlag(control / "stop" if control else None)
    out: Path | None = None
    try:
        with stop.handling():
            config.check(world_size)
            _init_process_group(config, world_size)
            out = choose_folder(config)
            summary: dict[str, Any] = Trainer(config, out, quiet=quiet, stop=stop).run()
            summary["stopped_by"] = stop.received if summary["stopped"] else None
            if control and rank == 0:
                (control / "summary.json").write_text(json.dumps(summary))
            if not quiet and not control and rank == 0:
                print(closing_lines(summary), file=sys.stderr)
        status = 0
    except TrainError as error:
        status = USER_ERROR
        _say_once(rank, str(error), control)
    except Exception as error:
        status = CRASH
        kept = _keep_traceback(out, rank)
        _say(f"rank {rank}: {one_line(error)}{kept}", control)
    _leave(status)
    return status


def _init_process_group(config: RunConfig, world_size: int) -> None:
    if "RANK" not in os.environ or dist.is_initialized():
        return
    if config.system == "one" and world_size == 1:
        return
    device = own_device(config.device, int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group(backends(device), timeout=timedelta(minutes=5))


def _say_once(rank: int, text: str, control: Path | None) -> None:
    """A message that every rank has: rank 0 says it."""
    if rank == 0:
        _say(text, control)


def _say(text: str, control: Path | None) -> None:
    """To the launcher, which prints the first one; without a launcher to the terminal."""
    if control is None:
        print(f"fsdp-train: {text}", file=sys.stderr, flush=True)
        return
    try:
        with (control / "message").open("x") as file:
            file.write(text)
    except FileExistsError:
        pass  # another rank was first: what it says is nearer to the cause


def _keep_traceback(out: Path | None, rank: int) -> str:
    text = traceback.format_exc()
    if out is None:
        print(text, file=sys.stderr)
        return ""
    path = out / f"traceback-rank-{rank}.txt"
    with contextlib.suppress(OSError):
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


def main(argv: list[str]) -> int:
    """Run the launch described in a control folder."""
    control = Path(argv[0])
    settings = json.loads((control / "config.json").read_text())
    quiet = settings.pop("quiet")
    return run_rank(RunConfig.from_json(settings), quiet=quiet, control=control)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # gloo may abort a process that takes its time to leave after the work is done
