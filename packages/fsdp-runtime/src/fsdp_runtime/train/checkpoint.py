"""Checkpoints that are complete or not there, with a digest of each file; read without running code from them.

    checkpoints/step-000100.part/   DCP's files of all ranks, run.json, sums.json; synced
    checkpoints/step-000100/        the same folder, renamed: complete
    checkpoints/latest              a file with the name of the newest complete one, replaced in one step

    sums.json                       {"files": {file: [bytes, SHA-256]}, "sum": SHA-256 of "files"}

A save that is killed leaves only a ``.part`` folder, which nothing loads and the next run removes. Digests find broken
hardware and files that were cut off or mixed up. They are of the bytes read back after writing.
"""

import hashlib
import io
import json
import os
import re
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from ragged_shard.device import is_cpu
from ragged_shard.dist import gather_from_ranks

from ..checkpoint.convert import METADATA, Reader
from .config import RunConfig
from .errors import TrainError, agreed, causes, one_line

SUMS = "sums.json"
RUN_FILE = "run.json"
# What reading JSON of another shape raises.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class SummingWriter(FileSystemWriter):
    """DCP's writer, which also writes ``sums.json``. Each rank computes the digests of its files."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, sync_files=True, overwrite=True)
        self._folder, self._rank = folder, rank

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write this rank's files, and their digests to ``sums-RANK.json``."""
        written = super().write_data(plan, planner)
        names = {result.storage_data.relative_path for result in written.wait()}
        digests = {name: _digest(self._folder / name) for name in sorted(names)}
        write_synced(self._folder / f"sums-{self._rank}.json", json.dumps(digests))
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata and ``sums.json``. Runs on one rank, after all have written."""
        super().finish(metadata, results)
        files = {name: _digest(self._folder / name) for name in (METADATA, RUN_FILE)}
        parts = [self._folder / f"sums-{rank}.json" for rank in range(len(results))]
        for part in parts:
            files |= json.loads(part.read_text())
        write_synced(self._folder / SUMS, json.dumps({"sum": _digest_of_json(files), "files": files}))
        for part in parts:
            part.unlink()


def find_damage(folder: Path, share: int = 0, shares: int = 1) -> list[str]:
    """One line for each file of a checkpoint that changed since it was written.

    Args:
        folder: the checkpoint.
        share, shares: check every `shares`-th file from `share` on, so that ranks can divide the work.
    """
    try:
        sums = json.loads((folder / SUMS).read_text())
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in sums["files"].items()}
        if sums["sum"] != _digest_of_json(sums["files"]) or not {METADATA, RUN_FILE} <= files.keys():
            return [f"{SUMS}: damaged"]
    except (OSError, *MALFORMED) as error:
        return [f"{SUMS}: {_reason(error)}"]
    lines = []
    for name in sorted(files)[share::shares]:
        size, digest = files[name]
        try:
            actual, actual_digest = _digest(folder / name)
        except (OSError, *MALFORMED) as error:
            lines.append(f"{name}: {_reason(error)}")
            continue
        if actual != size:
            lines.append(f"{name}: damaged: {actual} bytes, expected {size}")
        elif actual_digest != digest:
            lines.append(f"{name}: damaged")
    return lines


def is_as_written(folder: Path, name: str) -> bool:
    """True if one file of a checkpoint has the digest that was written with it."""
    try:
        return bool(json.loads((folder / SUMS).read_text())["files"][name] == _digest(folder / name))
    except (OSError, *MALFORMED):
        return False


def write_synced(path: Path, text: str) -> None:
    """Write a small file; it is on disk on return."""
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _digest(path: Path) -> list[Any]:
    """Bytes and SHA-256 of a file."""
    with path.open("rb") as file:
        return [os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _digest_of_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "missing"
    return (isinstance(error, OSError) and error.strerror) or "damaged"


class Planner(DefaultLoadPlanner):
    """DCP's planner for loading, for values and tensors that `torch.load(weights_only=True)` takes."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a setting, such as a learning rate."""
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


_PART = ".part"
_NAME = re.compile(r"step-\d{8,19}")
CHECKPOINTS = "checkpoints"
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)  # settings of the optimizer by parameter
_FAILURES = (Exception, CheckpointException)  # DCP's does not derive from Exception


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: of the run; ``checkpoints`` is made below it.
        keep: how many complete ones stay.
        group: a process group with gloo, for DCP's coordination, apart from the training's collectives; None for one
            process.
        device: of the values. They are copied to the host's memory, which is kept for the next save; training goes on
            while files are written.
    """

    def __init__(
        self, folder: Path, keep: int, group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self.folder, self.keep, self.group = folder / CHECKPOINTS, keep, group
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._pending: tuple[int, Any] | None = None  # step, and the future of DCP's save
        # Values are copied by storage: the other way of torch 2.11 does not know ragged tensors.
        ways = {"use_shared_memory": False, "use_async_staging": False}
        far = not is_cpu(device)
        self._stager = DefaultStager(StagingOptions(use_pinned_memory=far, use_non_blocking_copy=far, **ways))
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for part in self.folder.glob(f"*{_PART}"):  # of a save that was killed
                shutil.rmtree(part)

    def start(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, about: dict[str, Any]
    ) -> None:
        """Copy what is saved and begin to write; training may go on as soon as this returns.

        Collective: one gather of small objects, and DCP's own. `about` becomes ``run.json``.
        """
        assert self._pending is None, "finish the last save first"
        part = self.folder / (name_of(step) + _PART)
        weights, state = get_state_dict(model, optimizer, options=_OPTIONS)
        future: Any = Future()
        try:
            with agreed("making the folder"):  # before any rank writes there
                if self.rank == 0:
                    shutil.rmtree(part, ignore_errors=True)
                    part.mkdir(parents=True)
                    write_synced(part / RUN_FILE, json.dumps({**about, "step": step}, indent=1))
            future = async_save(
                {"model": weights, "optimizer": state},
                storage_writer=SummingWriter(part, self.rank),
                process_group=self.group,
                async_stager=self._stager,
            )
        except Exception as error:  # reported as a failed write is: at a step's end, by all ranks
            future.set_exception(error)
        self._pending = step, future

    def failed(self) -> bool:
        """True once this rank knows that the running save has failed."""
        return self._pending is not None and self._pending[1].done() and bool(self._pending[1].exception())

    def finish(self) -> int | None:
        """Wait for the running save and make it the latest; returns its step. All ranks call it.

        Raises:
            TrainError: it could not be written; the folder of the one before stays the latest.
        """
        if self._pending is None:
            return None
        (step, future), self._pending = self._pending, None
        part = self.folder / (name_of(step) + _PART)
        try:
            future.result()
            if self.rank == 0:
                self._publish(part, step)
        except _FAILURES as error:
            if self.rank == 0:
                shutil.rmtree(part, ignore_errors=True)
            newest = latest(self.folder.parent)
            stays = f"{newest} stays" if newest else "there is no older one"
            raise TrainError(f"cannot save {part.with_suffix('')}: {root_cause(error)}; {stays}") from error
        return step

    def _publish(self, part: Path, step: int) -> None:
        final = self.folder / name_of(step)
        _sync_folder(part)
        if final.exists():  # saved before a resume from an older one
            shutil.rmtree(final)
        os.rename(part, final)
        _sync_folder(self.folder)
        write_synced(self.folder / "latest.part-file", final.name)
        os.replace(self.folder / "latest.part-file", self.folder / "latest")
        _sync_folder(self.folder)
        published = sorted(_published(self.folder), key=lambda path: path.name)
        for old in [path for path in published if path.name < final.name][: -(self.keep - 1) or None]:
            shutil.rmtree(old)


def name_of(step: int) -> str:
    """The folder's name; sorts by step."""
    return f"step-{step:08d}"


def latest(run: Path) -> Path | None:
    """The newest checkpoint of a run, or None. Trusts ``latest``, falls back on the folders' names.

    Folders got their names when they were complete: one that misses files is returned too, and is damaged.
    """
    folder = run / CHECKPOINTS
    pointer = folder / "latest"
    if pointer.is_file():
        name = pointer.read_text(errors="replace").strip()
        if _NAME.fullmatch(name) and (folder / name).is_dir():
            return folder / name
    return max(_published(folder), key=lambda path: path.name, default=None)


def _published(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]


def checkpoints_of(run: Path) -> list[Path]:
    """A run's checkpoints to resume from: the latest, then older ones, the newest first; or `run`, if it is one."""
    if _NAME.fullmatch(run.name) or (run / METADATA).is_file():
        return [run] if run.is_dir() else []
    newest = latest(run)
    older = [path for path in _published(run / CHECKPOINTS) if newest and path.name < newest.name]
    return ([newest] if newest else []) + sorted(older, key=lambda path: path.name, reverse=True)


def newest_intact(run: Path) -> tuple[Path, list[str]]:
    """The newest checkpoint that is as it was written, and what is wrong with those after it, a line for each.

    Collective, a gather of small objects for each checkpoint; every rank reads its share of the files.

    Raises:
        TrainError: on every rank: there is none.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    damaged: list[str] = []
    for candidate in gather_from_ranks(checkpoints_of(run))[0]:
        damage_of_all = gather_from_ranks(find_damage(candidate, rank, world_size))
        damage = sorted({line for lines in damage_of_all for line in lines})
        if not damage:
            return candidate, damaged
        damaged.append(f"{candidate} is damaged: {shortened(damage)}")
    raise TrainError("; ".join(damaged) or f"--resume: {run} has no complete checkpoint")


def shortened(lines: list[str], most: int = 200) -> str:
    """Lines as one that can be read."""
    text = "; ".join(lines)
    return (
        text if len(text) <= most else f"{text[:most]}... ({len(lines)} files; fsdp-train verify lists all)"
    )


def read_about(checkpoint: Path) -> dict[str, Any]:
    """Read ``run.json``: the run that a checkpoint belongs to.

    Raises:
        TrainError: no complete checkpoint, or not of this version of the program.
    """
    try:
        about: dict[str, Any] = json.loads((checkpoint / RUN_FILE).read_text())
        RunConfig.from_json(about["config"])
        for name, kind in {"identity": dict, "parameters": dict, "step": int}.items():
            if type(about[name]) is not kind:
                raise TypeError(f"{name} is no {kind.__name__}")
    except (OSError, *MALFORMED) as error:
        raise TrainError(f"{checkpoint} is not a checkpoint of this fsdp-train: {one_line(error)}") from error
    return about


def load(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None
) -> None:
    """Fill model and optimizer from a checkpoint written at any world size. Collective.

    Raises:
        TrainError: files are missing or damaged.
    """
    try:
        weights, state = get_state_dict(model, optimizer, options=_OPTIONS)
        states = {"model": weights, "optimizer": state}
        dcp_load(states, storage_reader=Reader(checkpoint), planner=Planner(), process_group=group)
    except _FAILURES as error:
        raise TrainError(f"cannot load {checkpoint}: {root_cause(error)}") from error
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=_OPTIONS)


def describe(model: nn.Module) -> dict[str, list[Any]]:
    """Names, shapes and dtypes of a model's parameters, to tell one model from another."""
    return {
        name.removeprefix("module."): [list(p.shape), str(p.dtype).removeprefix("torch.")]
        for name, p in model.named_parameters()
    }


# Options that a resumed run may not change; sizes of the model are in addition. Of the data it has a digest.
_FIXED = ("optimizer", "seed", "seq_len", "batch", "dtype")


def check_same_run(
    checkpoint: Path, about: dict[str, Any], config: RunConfig, data: str, parameters: dict[str, list[Any]]
) -> None:
    """Raise, naming the first difference, if a checkpoint's run was not the beginning of this one.

    Args:
        about: as of `read_about`.
        data: the digest of this run's data.
        parameters: of this run's model, as of `describe`.
    """
    saved = about["parameters"]
    for name in sorted(saved.keys() | parameters.keys()):
        if saved.get(name) != parameters.get(name):
            there, here = (both.get(name, "absent") for both in (saved, parameters))
            raise TrainError(
                f"{checkpoint} is a checkpoint of another model: {name} is {there} there and {here} here"
            )
    run = RunConfig.from_json(about["config"])
    before, now = ({**{name: getattr(c, name) for name in _FIXED}, **vars(c.model)} for c in (run, config))
    before["data"], now["data"] = about["identity"].get("data"), data
    for name, value in now.items():
        if before[name] != value:
            raise TrainError(f"{checkpoint} was made with {name} {before[name]}, this run has {value}")
    if about["step"] > config.steps:
        raise TrainError(f"{checkpoint} is beyond --steps {config.steps}")


def root_cause(error: BaseException) -> str:
    """The error that caused a failure, in one line: DCP wraps errors of ranks, and torch.save hides a full disk."""
    chain = list(causes(error))
    for cause in chain:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
    if "unexpected pos" in str(chain[-1]):  # what torch.save says when a write came up short
        return "not all bytes could be written (is the disk full?)"
    return one_line(chain[-1])


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
