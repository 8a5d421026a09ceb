"""A checkpoint of DCP, read without running anything that is in it.

DCP keeps two kinds of pickles: `.metadata`, which its own reader unpickles as it is, and settings that are not tensors
(a learning rate, betas), which its own planner loads with `weights_only=False`. Here only the classes that such a file
is made of are unpickled, and what they say is compared with the files before memory is taken for it.
"""

import enum
import io
import math
import os
import pathlib
import pickle
import pickletools
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from .checksums import METADATA

# What torch's `.metadata` names, by module; dtypes are in addition.
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
_MEMO = {"PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET"}


class Reader(FileSystemReader):
    """DCP's reader of a folder, which unpickles DCP's own classes and nothing else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata, checked against the files of the folder.

        Raises:
            OSError: it is missing.
            ValueError: it is damaged, names other classes, or tensors that are not in the files.
        """
        folder = Path(self.path)
        try:
            metadata: Metadata = _unpickle((folder / METADATA).read_bytes())
            _check(folder, metadata)
        except OSError:
            raise
        except Exception as error:  # a damaged pickle raises anything
            raise ValueError(f"{METADATA}: damaged: {type(error).__name__}: {error}") from error
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class Planner(DefaultLoadPlanner):
    """DCP's planner for loading, which takes plain values and tensors and no other objects."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a setting; one that `torch.load(weights_only=True)` refuses is refused."""
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return pathlib.PurePath  # where it was saved, on whatever system
        if (module, name) == ("builtins", "getattr"):
            return _member
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise ValueError(f"it names {module}.{name}, which is not part of a checkpoint")


def _member(kind: Any, name: str) -> enum.Enum:
    """A member of an enum of torch's, which Python before 3.11.4 pickles as `getattr(kind, name)`."""
    if isinstance(kind, enum.EnumMeta):
        found: enum.Enum = kind[name]
        return found
    raise ValueError(f"it asks for {name!r} of {kind!r}, which is not part of a checkpoint")


def _unpickle(data: bytes) -> Any:
    for code, argument, _ in pickletools.genops(data):
        if code.name in _MEMO and int(argument or 0) > len(
            data
        ):  # the unpickler's table is as long as this number
            raise ValueError(f"a memo of {argument} entries in {len(data)} bytes")
    return _Unpickler(io.BytesIO(data)).load()


def _check(folder: Path, metadata: Any) -> None:
    """Raise ValueError (or what a wrong type leads to) unless tensors lie in the files that are named for them."""
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_meta, (StorageMeta, type(None))):
        raise ValueError(f"the pickle holds a {type(metadata).__name__}")
    sizes: dict[str, int] = {}
    stored: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        name, start, length = info.relative_path, int(info.offset), int(info.length)
        if not isinstance(index, MetadataIndex) or not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{str(name)[:100]!r} is not a file of this folder")
        if name not in sizes:
            sizes[name] = os.path.getsize(folder / name)
        if start < 0 or length < 0 or start + length > sizes[name]:
            raise ValueError(
                f"{index.fqn} is at bytes {start} to {start + length} of {name}, which has {sizes[name]}"
            )
        stored[index.fqn] = stored.get(index.fqn, 0) + length
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            _check_tensor(name, entry, stored.get(name, 0))
        elif not isinstance(entry, BytesStorageMetadata):
            raise ValueError(f"{name} is described by a {type(entry).__name__}")


def _check_tensor(name: str, entry: TensorStorageMetadata, stored: int) -> None:
    dtype, shape = entry.properties.dtype, tuple(entry.size)
    if not isinstance(dtype, torch.dtype) or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"{name} has dtype {dtype} and shape {shape}")
    if math.prod(shape) * dtype.itemsize > stored:
        raise ValueError(f"{name} of {dtype} and shape {shape} does not fit the {stored} bytes stored of it")
    for chunk in entry.chunks:
        offsets, lengths = tuple(chunk.offsets), tuple(chunk.sizes)
        inside = [0 <= o <= o + n <= size for o, n, size in zip(offsets, lengths, shape, strict=True)]
        if not all(inside):
            raise ValueError(f"{name} of shape {shape} has a piece at {offsets} of shape {lengths}")
