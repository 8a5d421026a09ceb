"""Folders of runs: which one a run writes to, locked by rank 0; and the commands ``verify`` and ``export``."""

import contextlib
import errno
import fcntl
import math
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ragged_shard import gather_from_ranks

from ..checkpoint.convert import converted_tensors, write_safetensors
from ..checkpoint.dcp_files import dcp_tensors
from .checkpoint import (
    CHECKPOINTS,
    RUN_FILE,
    checkpoints_of,
    find_damage,
    is_as_written,
    latest,
    read_about,
    saved_options,
    shortened,
)
from .config import RunConfig
from .errors import TrainError, one_line, say
from .report import METRICS

RUNS = Path("runs")
LOCK = ".lock"
_DTYPES = {"fp32": None, "bf16": torch.bfloat16}  # of an export; None: that of training


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run.

    Attributes:
        path: where it is.
        resume: whether to go on from its newest checkpoint.
    """

    path: Path
    resume: bool


@contextlib.contextmanager
def choose_folder(config: RunConfig) -> Iterator[RunFolder]:
    """The folder of a run, made if need be. Collective.

    Inside, rank 0 has locked it: the kernel frees the lock of a dead process. Leaving with an exception before anything
    was written removes the folders that were made. Where torchrun starts the ranks again, they go on with the folder
    that they had before.

    Raises:
        TrainError: on every rank: the folder holds another run, or a running one, or there is none to resume,
            or it cannot be made.
    """
    folder: RunFolder | None = None
    problem: str | None = None
    with contextlib.ExitStack() as stack:
        if not dist.is_initialized() or dist.get_rank() == 0:
            try:
                folder = _taken(config, stack)
            except TrainError as error:
                problem = str(error)
            except OSError as error:
                problem = f"cannot make the run's folder: {error.strerror}: {error.filename}"
        folder, problem = gather_from_ranks((folder, problem))[0]
        if folder is None:
            raise TrainError(problem or "no folder")
        yield folder


def _taken(config: RunConfig, stack: contextlib.ExitStack) -> RunFolder:
    """The run's folder, made and locked until the stack is left."""
    before = _begun_before(config)
    path = run_to_resume(config.out) if config.resume else before
    if path is None and config.out is not None:
        path = Path(config.out)
    while path is None:
        fresh = next_free(RUNS)
        with contextlib.suppress(FileExistsError):  # another run was faster
            _take(fresh, stack, new=True)
            return RunFolder(fresh, False)
    patience = config.timeout if path == before else 0.0  # a rank that is cut off ends within that time
    _take(path, stack, patience=patience)
    resume = latest(path) is not None
    if resume and not (config.resume or path == before):
        raise TrainError(
            f"--out {path} holds a run already: add --resume to go on with it, or give another folder"
        )
    return RunFolder(path, resume)


def _take(path: Path, stack: contextlib.ExitStack, *, new: bool = False, patience: float = 0.0) -> None:
    """Make a folder and lock it. `new`: it must not be there. `patience`: seconds to wait for the lock."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=not new)
    lock = _locked(path / LOCK, patience)
    if lock is not None:
        stack.callback(os.close, lock)

    def remove_if_unused(kind: object, error: object, trace: object) -> None:
        """Remove what a run makes before its first step; a folder that holds more is not empty and stays."""
        metrics = path / METRICS
        if error is None or not missing or (metrics.exists() and metrics.stat().st_size):
            return
        with contextlib.suppress(OSError):
            metrics.unlink(missing_ok=True)
            (path / LOCK).unlink(missing_ok=True)
            if (path / CHECKPOINTS).exists():
                (path / CHECKPOINTS).rmdir()
            for folder in missing:
                folder.rmdir()

    stack.push(remove_if_unused)


def this_launch() -> str:
    """A name that all starts of one launch under torchrun share, and no other launch has; "" without torchrun.

    That is torchrun's --rdzv-id; without one, the folder that rank 0's torchrun has made for its ranks' errors.
    """
    named = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if named not in ("", "none"):
        return named
    errors = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))  # LAUNCH/attempt_0/0/error.json
    return "/".join(errors.parts[-5:-3])


def _begun_before(config: RunConfig) -> Path | None:
    """The folder that an earlier start of this launch has taken."""
    launch = this_launch()
    candidates = [Path(config.out)] if config.out is not None else sorted(RUNS.glob("*"), reverse=True)
    return next((path for path in candidates if launch and _holder(path / LOCK)[1] == launch), None)


def run_to_resume(out: str | None) -> Path:
    """The folder that ``--resume`` means: `out`, or the newest of ``runs``.

    Raises:
        TrainError: it has no complete checkpoint.
    """
    if out is not None:
        if latest(Path(out)) is None:
            raise TrainError(f"--resume: {out} has no complete checkpoint")
        return Path(out)
    runs = sorted(
        (path for path in RUNS.glob("*") if latest(path) is not None), key=lambda p: p.stat().st_mtime
    )
    if not runs:
        raise TrainError(f"--resume: no run in {RUNS.resolve()} has a complete checkpoint; say --out FOLDER")
    return runs[-1]


def saved_config(run: Path) -> RunConfig:
    """The options of a run, from its newest checkpoint whose options can be read and are as they were written.

    Raises:
        TrainError: none can.
    """
    problems: list[str] = []
    for checkpoint in checkpoints_of(run):
        if not is_as_written(checkpoint, RUN_FILE):
            problems.append(f"{checkpoint} is damaged: {RUN_FILE}")
            continue
        try:
            return saved_options(checkpoint, read_about(checkpoint))
        except TrainError as error:
            problems.append(str(error))
    raise TrainError("; ".join(problems) or f"--resume: {run} has no complete checkpoint")


def next_free(parent: Path) -> Path:
    """The next numbered folder below `parent` that does not exist."""
    number = 1
    while (parent / f"{number:03d}").exists():
        number += 1
    return parent / f"{number:03d}"


def _holder(lock: Path) -> tuple[str, str]:
    """The process that locked a folder last, and its launch."""
    try:
        process, _, launch = lock.read_text(errors="replace").partition("\n")
    except OSError:
        return "", ""
    return process, launch


def _locked(path: Path, patience: float) -> int | None:
    """A descriptor of the file, locked; None on a file system without locks, which is said.

    Raises:
        TrainError: another process holds the lock, and has not let go within `patience` seconds.
    """
    until = time.monotonic() + patience
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                say(f"{path.parent} cannot be locked ({error.strerror}): see that no other run uses it")
                return None
            if not isinstance(error, BlockingIOError):
                raise
            if time.monotonic() < until:
                time.sleep(0.2)
                continue
            raise TrainError(
                f"{path.parent} is in use by another run, {_holder(path)[0] or 'which just began'}"
            ) from None
        if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
            os.truncate(file, 0)
            os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n{this_launch()}".encode())
            return file
        os.close(file)  # removed by a run whose start failed, after it was opened here


def verify(run: str) -> int:
    """Read every checkpoint of `run` (or the checkpoint `run`) and print the damaged files.

    Returns 0 if all are as they were written, else 1.

    Raises:
        TrainError: there is no checkpoint.
    """
    checkpoints = checkpoints_of(Path(run))
    if not checkpoints:
        raise TrainError(f"{run} has no complete checkpoint")
    status = 0
    for checkpoint in checkpoints:
        lines = find_damage(checkpoint)
        for line in lines:
            print(f"{checkpoint}: {line}")
        size = sum(path.stat().st_size for path in checkpoint.iterdir())
        if not lines:
            print(f"{checkpoint}: as written, {size / 1e6:,.1f} MB")
        status = status or int(bool(lines))
    return status


def export(run: str, output: str | None, dtype: str) -> int:
    """Write the newest checkpoint of `run` (or the checkpoint `run`) to `output`; returns 0.

    In one process, without ranks, whatever their number was. Tied weights are written once for each name that the
    checkpoint has. The file appears whole or not at all.

    Raises:
        TrainError: no complete checkpoint, or it cannot be read, or the file cannot be written.
    """
    folder = Path(run)
    checkpoint = next(iter(checkpoints_of(folder)), None)
    if checkpoint is None:
        raise TrainError(f"{run} has no complete checkpoint")
    if lines := find_damage(checkpoint):
        raise TrainError(f"{checkpoint} is damaged: {shortened(lines)}")
    path = Path(output) if output else Path("." if checkpoint == folder else run, "model.safetensors")
    if path.is_dir():
        raise TrainError(f"cannot write {path}: it is a folder")
    step = read_about(checkpoint)["step"]
    try:
        tensors = converted_tensors(dcp_tensors(checkpoint, "model"), dtype=_DTYPES[dtype])
        write_safetensors(path, tensors, {"step": str(step)})
    except Exception as error:  # of a damaged file anything
        raise TrainError(f"cannot export {checkpoint} to {path}: {one_line(error)}") from error
    total = sum(math.prod(tensor.shape) for tensor in tensors)
    print(f"{path}: {len(tensors)} tensors, {total / 1e6:.2f}M parameters, step {step}")
    return 0
