"""Folders of runs: which one a run writes to, locked by rank 0; and the command ``verify``."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from ragged_shard.dist import gather_from_ranks

from .checkpoint import RUN_FILE, checkpoints_of, find_damage, is_as_written, latest, read_about
from .config import RunConfig
from .errors import TrainError, agreed, say

RUNS = Path("runs")
LOCK = ".lock"


@contextlib.contextmanager
def choose_folder(config: RunConfig) -> Iterator[tuple[Path, bool]]:
    """The folder of a run, made if need be, and whether to go on from its newest checkpoint. Collective.

    Inside, rank 0 has locked it: the kernel frees the lock of a dead process. Where torchrun starts the ranks again,
    its --rdzv-id, which the lock file has, says that it is the same run, which goes on.

    Raises:
        TrainError: on every rank: the folder holds another run, or a running one, or there is none to resume.
    """
    chosen = Path(), False
    with contextlib.ExitStack() as stack:
        with agreed("choosing the run's folder"):
            if not dist.is_initialized() or dist.get_rank() == 0:
                chosen = _taken(config, stack)
        yield gather_from_ranks(chosen)[0]


def _taken(config: RunConfig, stack: contextlib.ExitStack) -> tuple[Path, bool]:
    launch = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    restarted = [path for path in RUNS.glob("*") if config.out is None and _began(path, launch)]
    if config.out is not None or config.resume:
        path = run_to_resume(config.out) if config.resume else Path(config.out or "")
    else:
        path = restarted[0] if restarted else next_free(RUNS)
    again = _began(path, launch)
    path.mkdir(parents=True, exist_ok=True)
    lock = stack.enter_context((path / LOCK).open("a"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TrainError(f"{path} is in use by another run") from None
    except OSError as error:
        say(f"{path} cannot be locked ({error.strerror}): see that no other run uses it")
    lock.truncate(0)
    print(launch, end="", file=lock, flush=True)
    resume = latest(path) is not None
    if resume and not (config.resume or again):
        raise TrainError(
            f"--out {path} holds a run already: add --resume to go on with it, or give another folder"
        )
    return path, resume


def _began(path: Path, launch: str) -> bool:
    """True if this launch of torchrun has begun the run in a folder."""
    return launch != "none" and (path / LOCK).is_file() and (path / LOCK).read_text() == launch


def run_to_resume(out: str | None) -> Path:
    """The folder that ``--resume`` means: `out`, or the newest of ``runs``.

    Raises:
        TrainError: it has no complete checkpoint.
    """
    folders = RUNS.glob("*") if out is None else [Path(out)]
    runs = [path for path in folders if latest(path) is not None]
    if not runs:
        raise TrainError(f"--resume: {out or RUNS.resolve()} has no complete checkpoint; say --out FOLDER")
    return max(runs, key=lambda path: path.stat().st_mtime)


def saved_config(run: Path) -> RunConfig:
    """The options of a run, from its newest checkpoint that has them as they were written.

    Raises:
        TrainError: none has.
    """
    for checkpoint in checkpoints_of(run):
        if is_as_written(checkpoint, RUN_FILE):
            return RunConfig.from_json(read_about(checkpoint)["config"])
    raise TrainError(f"--resume: no checkpoint in {run} has {RUN_FILE} as it was written")


def next_free(parent: Path) -> Path:
    """The next numbered folder below `parent` that does not exist."""
    number = 1
    while (parent / f"{number:03d}").exists():
        number += 1
    return parent / f"{number:03d}"


def verify(run: str) -> int:
    """Read every checkpoint of `run` (or the checkpoint `run`) and print the damaged files; returns 1 if there are any.

    Raises:
        TrainError: there is no checkpoint.
    """
    status, checkpoints = 0, checkpoints_of(Path(run))
    if not checkpoints:
        raise TrainError(f"{run} has no complete checkpoint")
    for checkpoint in checkpoints:
        lines = find_damage(checkpoint)
        size = sum(path.stat().st_size for path in checkpoint.iterdir())
        for line in lines or [f"as written, {size / 1e6:,.1f} MB"]:
            print(f"{checkpoint}: {line}")
        status = status or int(bool(lines))
    return status
