"""Folders of runs: which one a run writes to, locked by rank 0; and the commands ``verify`` and ``export``."""

import contextlib
import errno
import fcntl
import os
import socket
import time
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from ragged_shard import gather_from_ranks

from ..checkpoint.dcp_files import Reader
from .checkpoint import (
    CHECKPOINTS,
    RUN_FILE,
    Planner,
    checkpoints_of,
    find_damage,
    is_as_written,
    latest,
    read_about,
    shortened,
)
from .config import RunConfig
from .errors import TrainError, one_line, say
from .report import METRICS

RUNS = Path("runs")
LOCK = ".lock"


class RunFolder:
    """The folder of a run. On rank 0 it is locked while this is open: the kernel frees the lock of a dead process.

    Leaving with an exception before anything was written removes the folders that were made.

    Attributes:
        resume: whether to go on from its newest checkpoint.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path, self.resume = path, resume
        self._lock: int | None = None
        self._made: list[Path] = []

    def make(self, *, new: bool = False, patience: float = 0.0) -> None:
        """Make the folder, and lock it. `new`: it must not be there. `patience`: seconds to wait for the lock."""
        missing = [p for p in (self.path, *self.path.parents) if not p.exists()]
        self.path.mkdir(parents=True, exist_ok=not new)
        self._made = missing
        self._lock = _locked(self.path / LOCK, patience)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._made:
            self._remove_if_unused()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _remove_if_unused(self) -> None:
        """Only what a run makes before its first step; a folder that holds more is not empty and stays."""
        metrics = self.path / METRICS
        if metrics.exists() and metrics.stat().st_size:
            return
        with contextlib.suppress(OSError):
            metrics.unlink(missing_ok=True)
            (self.path / LOCK).unlink(missing_ok=True)
            if (self.path / CHECKPOINTS).exists():
                (self.path / CHECKPOINTS).rmdir()
            for folder in self._made:
                folder.rmdir()


def choose_folder(config: RunConfig) -> RunFolder:
    """The folder of a run, made if need be and locked. Collective.

    Where torchrun starts the ranks again, they go on with the folder that they had before.

    Raises:
        TrainError: on every rank: the folder holds another run, or a running one, or there is none to resume,
            or it cannot be made.
    """
    folder: RunFolder | None = None
    problem: str | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            folder = _resumed(config) if config.resume else _fresh(config)
        except TrainError as error:
            problem = str(error)
        except OSError as error:
            problem = f"cannot make the run's folder: {error.strerror}: {error.filename}"
    chosen = (folder.path, folder.resume) if folder else None
    chosen, problem = gather_from_ranks((chosen, problem))[0]
    if chosen is None:
        raise TrainError(problem or "no folder")
    return folder or RunFolder(chosen[0], resume=chosen[1])


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


def _fresh(config: RunConfig) -> RunFolder:
    before = _begun_before(config)
    if before is not None:
        folder = RunFolder(before)
        folder.make(patience=config.timeout)  # a rank that is cut off ends within that time
        folder.resume = latest(before) is not None
        return folder
    while config.out is None:
        folder = RunFolder(next_free(RUNS))
        with contextlib.suppress(FileExistsError):  # another run was faster
            folder.make(new=True)
            return folder
    folder = RunFolder(Path(config.out))
    with contextlib.ExitStack() as on_failure:
        on_failure.push(folder)
        folder.make()
        if latest(folder.path) is not None:
            raise TrainError(
                f"--out {folder.path} holds a run already: add --resume to go on with it, or give another folder"
            )
        on_failure.pop_all()
    return folder


def _resumed(config: RunConfig) -> RunFolder:
    folder = RunFolder(run_to_resume(config.out), resume=True)
    folder.make(patience=config.timeout if _begun_before(config) == folder.path else 0.0)
    return folder


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
            return RunConfig.from_json(read_about(checkpoint)["config"])
        except TrainError as error:
            problems.append(str(error))
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            problems.append(f"{checkpoint} has options of another version of fsdp-train: {one_line(error)}")
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
    from safetensors.torch import save_file

    folder = Path(run)
    checkpoint = next(iter(checkpoints_of(folder)), None)
    if checkpoint is None:
        raise TrainError(f"{run} has no complete checkpoint")
    if lines := find_damage(checkpoint):
        raise TrainError(f"{checkpoint} is damaged: {shortened(lines)}")
    about = read_about(checkpoint)
    tensors = read_model(checkpoint)
    if dtype == "bf16":
        tensors = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in tensors.items()}
    path = Path(output) if output else folder / "model.safetensors"
    if output is None and checkpoint == folder:
        path = Path("model.safetensors")
    if path.is_dir():
        raise TrainError(f"cannot write {path}: it is a folder")
    partial = path.with_name(path.name + ".part")
    try:
        save_file(tensors, partial, metadata={"format": "pt", "step": str(about["step"])})
        os.replace(partial, path)
    except (OSError, ValueError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise TrainError(f"cannot write {path}: {one_line(error)}") from error
    except Exception as error:  # safetensors raises its own class for a full disk
        raise TrainError(f"cannot write {path}: {one_line(error)}") from error
    total = sum(t.numel() for t in tensors.values())
    print(f"{path}: {len(tensors)} tensors, {total / 1e6:.2f}M parameters, step {about['step']}")
    return 0


def read_model(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The whole model of a checkpoint, on the host, in this process alone.

    Raises:
        TrainError: files are missing or damaged.
    """
    try:
        reader = Reader(checkpoint)
        entries = reader.read_metadata().state_dict_metadata
        wanted: dict[str, Any] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in entries.items()
            if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
        }
        with warnings.catch_warnings():  # that one process loads is what is meant
            warnings.simplefilter("ignore", UserWarning)
            dcp_load(wanted, storage_reader=reader, planner=Planner(), no_dist=True)
    except (Exception, CheckpointException) as error:
        raise TrainError(f"cannot read {checkpoint}: {one_line(error)}") from error
    return {name.removeprefix("model."): tensor.contiguous() for name, tensor in wanted.items()}
