"""Folders of torch.distributed.checkpoint (DCP), read without running code from them and without a process group.

    .metadata            names, shapes and dtypes, and for each chunk of a tensor its place: file, offset, length
    __0_0.distcp, ...    chunks one after the other, each a zip of `torch.save` with raw bytes inside

`Extent` is one contiguous or strided run of raw bytes in a file, so that any box of a tensor is read by byte range.
"""

import enum
import io
import math
import os
import pathlib
import pickle
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata

from ragged_shard import Box

from .byte_ranges import Extent, StoredTensors
from .files import Ints, Stored

METADATA = ".metadata"
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


def dcp_tensors(folder: str | os.PathLike[str], entry: str | None = None) -> StoredTensors:
    """The tensors of a model in a folder that any ranks have written; reads `.metadata` alone.

    Args:
        folder: with `.metadata`.
        entry: of the saved state dict that is the model's state dict, such as "model" or "app.model". Defaults to
            "model" if there is one, else the tensors at the top.

    Raises:
        OSError, ValueError: as of `Reader`; or there are no such tensors, naming the entries that there are.
    """
    folder = Path(folder)
    metadata = Reader(folder).read_metadata()
    tensors = {
        name: about
        for name, about in metadata.state_dict_metadata.items()
        if isinstance(about, TensorStorageMetadata)
    }
    paths = {name: tuple(map(str, (metadata.planner_data or {}).get(name, (name,)))) for name in tensors}
    roots = {name: path[0] if len(path) > 1 else "" for name, path in paths.items()}
    if entry is None:
        entry = "model" if "model" in roots.values() else ""
    names = {short: name for name, path in paths.items() if (short := _inside(path, entry))}
    chosen = set(names.values())
    left_out = Counter(root for name, root in roots.items() if name not in chosen)
    if not names:
        there = sorted({root or "tensors at the top" for root in roots.values()})
        raise ValueError(f"{folder} has no tensors in the entry {entry!r} of its state dict; it has {there}")
    stored = {
        short: Stored(
            short,
            folder,
            torch.empty(tensors[name].size, dtype=tensors[name].properties.dtype, device="meta"),
        )
        for short, name in names.items()
    }

    @lru_cache(maxsize=8)
    def extents_of(short: str) -> list[Extent]:
        name = names[short]
        return list(_extents(folder, metadata, name, tensors[name]))

    return StoredTensors(folder, stored, extents_of, dict(left_out))


def _inside(path: tuple[str, ...], entry: str) -> str | None:
    """The name of a tensor inside of an entry of the state dict. None: it is elsewhere."""
    if not entry:
        return path[0] if len(path) == 1 else None
    name = ".".join(path)
    return name.removeprefix(f"{entry}.") if name.startswith(f"{entry}.") else None


def _extents(folder: Path, metadata: Metadata, name: str, about: TensorStorageMetadata) -> Iterator[Extent]:
    dtype, total = about.properties.dtype, 0
    for chunk in about.chunks:
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        total += box.numel
        if not box.numel:
            continue
        place = _place(metadata, name, box)
        if place.transform_descriptors:
            raise ValueError(
                f"{folder}: {name} was saved with {place.transform_descriptors}; only torch can read it"
            )
        with (folder / place.relative_path).open("rb") as file:
            start, strides = _raw_bytes(_View(file, place.offset, place.length), name, box.sizes, dtype)
        yield Extent(folder / place.relative_path, place.offset + start, box, strides)
    if total != about.size.numel():
        raise ValueError(
            f"{folder}: the chunks of {name} have {total} elements; expected {about.size.numel()}"
        )


def _place(metadata: Metadata, name: str, box: Box) -> Any:
    place = metadata.storage_data.get(MetadataIndex(name, torch.Size(box.offsets)))
    if place is None:
        raise ValueError(f"{METADATA}: no file has {name} from {box.offsets} on")
    return place


def _raw_bytes(view: "_View", name: str, shape: Ints, dtype: torch.dtype) -> tuple[int, Ints]:
    """Where the values of a tensor begin inside of what `torch.save` wrote, and its strides."""
    try:
        with zipfile.ZipFile(view) as archive:
            members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
            tensor = _TensorUnpickler(io.BytesIO(archive.read(members["data.pkl"]))).load()
            data = members[f"data/{tensor.key}"]
            view.seek(data.header_offset)
            header = view.read(30)
    except (zipfile.BadZipFile, KeyError, AttributeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{name}: its chunk is damaged, or not one that torch.save wrote: {error}") from None
    if tensor.shape != shape or data.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name}: its chunk has shape {tensor.shape}; expected {shape}, not compressed")
    if data.file_size != math.prod(shape) * dtype.itemsize or tensor.offset:
        raise ValueError(f"{name}: its chunk has {data.file_size} bytes; expected {shape} of {dtype}")
    # A member's name and its extra field come between its header and its bytes.
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return data.header_offset + len(header) + lengths, tensor.strides


@dataclass(frozen=True)
class _SavedTensor:
    """Layout of a pickled tensor."""

    key: str
    offset: int
    shape: Ints
    strides: Ints


class _TensorUnpickler(_Unpickler):
    """Unpickles one plain tensor without its values."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")):
            return lambda key, offset, shape, strides, *_: _SavedTensor(
                key, offset, tuple(shape), tuple(strides)
            )
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return name
        return super().find_class(module, name)

    def persistent_load(self, identity: Any) -> str:
        return str(identity[2])


class _View(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view[: max(0, self._size - self._at)])  # type: ignore[attr-defined]
        self._at += count
        return int(count)
