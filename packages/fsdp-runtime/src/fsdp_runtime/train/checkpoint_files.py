"""The files of a checkpoint: a digest of each, and DCP's pickles read without running code from them.

    sums.json    {"files": {file: [bytes, SHA-256]}, "sum": SHA-256 of "files"}

Digests find broken hardware and files that were cut off or mixed up. They are of the bytes read back after writing.
"""

import enum
import hashlib
import io
import json
import os
import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

SUMS = "sums.json"
METADATA = ".metadata"  # DCP's
RUN_FILE = "run.json"
# What reading JSON of another shape raises.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
# The classes in torch's `.metadata`, by module; dtypes and paths are in addition.
_CLASSES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "collections": {"OrderedDict"},
}
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}


class SummingWriter(FileSystemWriter):
    """DCP's writer, which also writes ``sums.json``. Each rank computes the digests of its files."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, sync_files=True, overwrite=True)
        self._folder, self._rank = folder, rank

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
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
    """Whether one file of a checkpoint has the digest that was written with it."""
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


class Reader(FileSystemReader):
    """DCP's reader; its metadata is unpickled with the classes of `_CLASSES` only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read ``.metadata``.

        Raises:
            OSError: it is missing.
            ValueError: it is damaged, names other classes or files elsewhere, or a tensor larger than all files.
        """
        folder = Path(self.path)
        try:
            metadata: Metadata = _Unpickler(io.BytesIO((folder / METADATA).read_bytes())).load()
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            _check(folder, metadata)
        except OSError:
            raise
        except Exception as error:  # a damaged pickle raises anything
            raise ValueError(f"{METADATA}: damaged: {type(error).__name__}: {error}") from error
        return metadata


def _check(folder: Path, metadata: Metadata) -> None:
    for name in {info.relative_path for info in metadata.storage_data.values()}:
        if Path(name).name != name:
            raise ValueError(f"{name[:100]!r} is not a file of this folder")
    stored = sum(path.stat().st_size for path in folder.iterdir())
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and (
            min(entry.size, default=0) < 0 or entry.size.numel() * entry.properties.dtype.itemsize > stored
        ):
            raise ValueError(
                f"{name} of shape {tuple(entry.size)} does not fit the {stored} bytes of the files"
            )


class Planner(DefaultLoadPlanner):
    """DCP's planner for loading, for values and tensors that `torch.load(weights_only=True)` takes."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a setting, such as a learning rate."""
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return pathlib.PurePath  # where it was saved, on any system
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        raise ValueError(f"it names {module}.{name}, which is not part of a checkpoint")


def _enum_member(kind: Any, name: str) -> enum.Enum:
    """A member of an enum of torch's, which Python before 3.11.4 pickles as `getattr(kind, name)`."""
    if not isinstance(kind, enum.EnumMeta):
        raise ValueError(f"it asks for {name!r} of {kind!r}, which is not part of a checkpoint")
    member: enum.Enum = kind[name]
    return member
