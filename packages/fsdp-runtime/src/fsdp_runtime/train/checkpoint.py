"""Folders of runs, and their checkpoints: complete or absent, with a digest of each file; no code in them is run.

    checkpoints/step-00000100.part/   DCP's files of all ranks, and run.json; synced
    checkpoints/step-00000100/        the same folder, renamed: complete
    run.json                          {"about": {"config", "data", "step", "files": {file: SHA-256}}, "digest": SHA-256}

A killed save leaves a ``.part`` folder, which the next run removes. Digests detect changed files, which DCP would load.
"""

import contextlib
import fcntl
import hashlib
import io
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import Optimizer

from ragged_shard.dist import gather_from_ranks

from ..checkpoint.convert import METADATA, Reader
from .config import RunConfig
from .errors import TrainError, agreed, causes, one_line, say

RUNS = Path("runs")
LOCK = ".lock"
RUN_FILE = "run.json"
CHECKPOINTS = "checkpoints"
_NAME = re.compile(r"step-\d{8,19}")
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)  # settings of the optimizer by parameter
_FAILURES = (Exception, CheckpointException)  # DCP's does not derive from Exception
# Options that a resumed run may not change, in addition to sizes of the model.
_FIXED = ("optimizer", "seed", "seq_len", "batch", "dtype")


class Planner(DefaultLoadPlanner):
    """DCP's planner for loading, for values and tensors that `torch.load(weights_only=True)` takes."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a setting, such as a learning rate."""
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


def save(run: Path, model: nn.Module, optimizer: Optimizer, about: dict[str, Any], keep: int) -> None:
    """Write a checkpoint of all ranks. The `keep` newest stay, this one included. Collective.

    `about` becomes part of ``run.json``; its "step" names the folder. Raises `TrainError` on every rank if it could not
    be written; the one before stays.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    final = run / CHECKPOINTS / f"step-{about['step']:08d}"
    part = final.with_suffix(".part")
    weights, state = get_state_dict(model, optimizer, options=_OPTIONS)
    try:
        with agreed("making the folder"):  # before any rank writes there
            if rank == 0:
                for unfinished in final.parent.glob("*.part"):
                    shutil.rmtree(unfinished)
                part.mkdir(parents=True)
        dcp_save({"model": weights, "optimizer": state}, storage_writer=FileSystemWriter(part))
        with agreed("reading the files"):
            own = [*part.glob(f"__{rank}_*"), *([part / METADATA] if rank == 0 else [])]
            files = {path.name: _digest(path) for path in own}
        all_files = {name: digest for each in gather_from_ranks(files) for name, digest in each.items()}
        with agreed("renaming the folder"):
            if rank == 0:
                _publish(part, final, {**about, "files": all_files}, keep)
    except _FAILURES as error:
        newest = latest(run)
        stays = f"{newest} stays" if newest else "there is no older one"
        reason = one_line(error) if isinstance(error, TrainError) else root_cause(error)
        if isinstance(error, CheckpointException):
            reason = f"rank {min(error.failures)}: {reason}"
        raise TrainError(f"cannot save {final}: {reason}; {stays}") from error


def _publish(part: Path, final: Path, about: dict[str, Any], keep: int) -> None:
    with open(part / RUN_FILE, "w") as file:
        json.dump({"about": about, "digest": _digest_of_json(about)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(part)
    os.rename(part, final)
    _sync_folder(final.parent)
    for old in _complete(final.parent)[:-keep]:
        shutil.rmtree(old)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _complete(folder: Path) -> list[Path]:
    """Complete checkpoints in a folder, the newest last."""
    return sorted(path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir())


def latest(run: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None."""
    return max(_complete(run / CHECKPOINTS), default=None)


def read_about(checkpoint: Path) -> dict[str, Any]:
    """Read ``run.json``; raises `TrainError` if it is missing, has changed, or is of another version of the program."""
    try:
        saved = json.loads((checkpoint / RUN_FILE).read_text())
        about: dict[str, Any] = saved["about"]
        if saved["digest"] != _digest_of_json(about):
            raise ValueError("its content has changed")
        RunConfig.from_json(about["config"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TrainError(f"{checkpoint / RUN_FILE} is damaged: {one_line(error)}") from error
    return about


def check_files(checkpoint: Path, share: int = 0, shares: int = 1) -> None:
    """Raise `TrainError` if a file is missing or has changed since. Checks every `shares`-th from `share` on."""
    files = read_about(checkpoint)["files"]
    for name in sorted(files)[share::shares]:
        try:
            changed = _digest(checkpoint / name) != files[name]
        except OSError as error:
            raise TrainError(f"{checkpoint / name} is damaged: {error.strerror}") from error
        if changed:
            raise TrainError(f"{checkpoint / name} is damaged: its content has changed")


def check_same_run(checkpoint: Path, config: RunConfig, data: str) -> int:
    """Steps of a checkpoint, from which `config` may continue; `data` is the digest of this run's data.

    Raises `TrainError` with the first difference if it belongs to a run with other options, sizes or data.
    """
    about = read_about(checkpoint)
    saved = RunConfig.from_json(about["config"])
    before, now = ({**{name: getattr(c, name) for name in _FIXED}, **vars(c.model)} for c in (saved, config))
    before["data"], now["data"] = about["data"], data
    for name, value in now.items():
        if before[name] != value:
            raise TrainError(f"{checkpoint} was made with {name} {before[name]}, this run has {value}")
    step = int(about["step"])
    if step > config.steps:
        raise TrainError(f"{checkpoint} is beyond --steps {config.steps}")
    return step


def load(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Fill model and optimizer from a checkpoint written at any world size. Collective.

    Raises `TrainError` on every rank if files are missing or damaged, or do not fit the model.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with agreed("reading the checkpoint"):
        check_files(checkpoint, rank, world_size)
    try:
        weights, state = get_state_dict(model, optimizer, options=_OPTIONS)
        states = {"model": weights, "optimizer": state}
        dcp_load(states, storage_reader=Reader(checkpoint), planner=Planner())
    except _FAILURES as error:
        raise TrainError(f"cannot load {checkpoint}: {root_cause(error)}") from error
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=_OPTIONS)


def root_cause(error: BaseException) -> str:
    """The error that caused a failure, in one line: DCP wraps errors of ranks."""
    chain = list(causes(error))
    full = [cause.strerror for cause in chain if isinstance(cause, OSError) and cause.strerror]
    return full[0] if full else one_line(chain[-1])


@contextlib.contextmanager
def choose_folder(config: RunConfig) -> Iterator[tuple[Path, bool]]:
    """The folder of a run, created if missing, and whether to resume from its newest checkpoint. Collective.

    Rank 0 holds a lock on the folder inside; the kernel frees the lock of a dead process. If torchrun restarts ranks
    with the same --out, its --rdzv-id, which the lock file contains, identifies the run, which then resumes. Raises
    `TrainError` on every rank if the folder contains another run, another process writes to it, or no run can resume.
    """
    chosen = Path(), False
    with contextlib.ExitStack() as stack:
        with agreed("choosing the run's folder"):
            if not dist.is_initialized() or dist.get_rank() == 0:
                chosen = _taken(config, stack)
        yield gather_from_ranks(chosen)[0]


def _taken(config: RunConfig, stack: contextlib.ExitStack) -> tuple[Path, bool]:
    launch = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    new = Path(config.out) if config.out else next_free(RUNS)
    path = checkpoint_to_resume(config.out).parents[1] if config.resume else new
    again = launch != "none" and (path / LOCK).is_file() and (path / LOCK).read_text() == launch
    path.mkdir(parents=True, exist_ok=True)
    lock = stack.enter_context((path / LOCK).open("a"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TrainError(f"{path} is in use by another run") from None
    except OSError as error:  # a filesystem without locks
        say(f"{path} cannot be locked ({error.strerror}): make sure that no other run uses it")
    lock.truncate(0)
    print(launch, end="", file=lock, flush=True)
    resume = latest(path) is not None
    if resume and not (config.resume or again):
        raise TrainError(f"--out {path} contains a run: add --resume to continue it, or give another folder")
    return path, resume


def checkpoint_to_resume(out: str | None) -> Path:
    """The newest checkpoint of `out`, or of the newest run in ``runs``. Raises `TrainError` if there is none."""
    runs = RUNS.glob("*") if out is None else [Path(out)]
    checkpoints = [checkpoint for run in runs if (checkpoint := latest(run)) is not None]
    if not checkpoints:
        raise TrainError(f"--resume: {out or RUNS.resolve()} has no complete checkpoint; add --out FOLDER")
    return max(checkpoints, key=lambda checkpoint: checkpoint.parents[1].stat().st_mtime)


def next_free(parent: Path) -> Path:
    """The next numbered folder below `parent` that does not exist."""
    folders = (parent / f"{number:03d}" for number in itertools.count(1))
    return next(folder for folder in folders if not folder.exists())
