"""Safetensors files, opened for reading at offsets. Headers are checked against the files before anything is read.

folder  ->  index or *.safetensors  ->  headers  ->  Stored: name, dtype, shape, file, byte range
"""

import hashlib
import itertools
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_MAX_HEADER = 100_000_000  # bytes; the limit of the format's own library
_LONGEST_NAME = 255  # of a file
_MOST_DIMS = 64  # of a tensor of torch
_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint.

    Attributes:
        name, dtype, shape: as the header says.
        file: the number of its file.
        start: its first byte in the file.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: int
    start: int


class Checkpoint:
    """The files of a checkpoint, open until `close`. A context manager.

    Args:
        path: a `.safetensors` file, an index, or a folder with an index or with `*.safetensors`.

    Attributes:
        tensors: what is stored, by name.
        bytes_read: of tensors, so far.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: a header or index that is damaged, or that does not fit its file; naming the file and the tensor.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.bytes_read = 0
        self._files: list[tuple[Path, int, os.stat_result]] = []
        self._headers = hashlib.sha256()
        self.tensors: dict[str, Stored] = {}
        try:
            for file, listed in _files_of(self.path):
                self._open(file, listed)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, listed: list[str] | None) -> None:
        _check_is_file(path)
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        about = os.fstat(descriptor)
        self._files.append((path, descriptor, about))
        number = len(self._files) - 1
        text = _header_of(path, descriptor, about.st_size)
        found = _entries(path, text, about.st_size, number)
        self._headers.update(path.name.encode() + b"\0" + text + str(about.st_size).encode())
        for name in found if listed is None else listed:
            if name not in found:
                raise ValueError(
                    f"{path}: {name[:200]} is not in it, but the index lists it there; index and files belong to "
                    "different checkpoints"
                )
            if name in self.tensors:
                other = self._files[self.tensors[name].file][0].name
                raise ValueError(
                    f"{self.path}: {name[:200]} is in {other} and in {path.name}; expected it once"
                )
            self.tensors[name] = found[name]

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.pop()[1])

    @property
    def fingerprint(self) -> str:
        """Of names, sizes and headers: equal where two ranks see the same files."""
        return self._headers.hexdigest()

    def read(self, stored: Stored, first: int, into: memoryview) -> None:
        """Read elements of a tensor from number `first` on, as many as `into` has bytes for.

        Raises:
            OSError: the file ends early, or the system says so; naming file and tensor.
        """
        path, descriptor, _ = self._files[stored.file]
        offset, done = stored.start + first * stored.dtype.itemsize, 0
        while done < len(into):
            count = os.preadv(descriptor, [into[done:]], offset + done)
            if count == 0:
                raise OSError(
                    f"{path}: ends at byte {offset + done}, inside of {stored.name}: it was cut off"
                )
            done += count
        self.bytes_read += done

    def check_unchanged(self) -> None:
        """Raise OSError where a file was replaced or written to since it was opened."""
        for path, _, about in self._files:
            now = os.stat(path)
            if _identity(now) != _identity(about):
                raise OSError(f"{path} was replaced or changed while it was read; load it again")


def _identity(about: os.stat_result) -> tuple[int, int, int, int]:
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


def _files_of(path: Path) -> list[tuple[Path, list[str] | None]]:
    """The files, and of each the tensors that count; None: all."""
    if path.is_dir():
        indices = sorted(path.glob("*.safetensors.index.json"))
        if len(indices) > 1:
            names = [one.name for one in indices]
            raise ValueError(f"{path} has several indices {names}; pass the one to load")
        if not indices:
            files = sorted(path.glob("*.safetensors"))
            if not files:
                raise FileNotFoundError(f"{path} has no *.safetensors")
            return [(file, None) for file in files]
        path = indices[0]
    if path.suffix != ".json":
        return [(path, None)]
    _check_is_file(path)
    try:
        content: Any = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error}); expected an index with a weight_map") from None
    listed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ValueError(f"{path}: no weight_map from tensor names to file names")
    by_file: dict[str, list[str]] = {}
    for tensor, name in listed.items():
        by_file.setdefault(name, []).append(tensor)
    for name in by_file:
        if len(name) > _LONGEST_NAME or not name.isprintable():
            raise ValueError(f"{path}: weight_map names {name[:100]!r}, which is not a file name")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{path}: weight_map names {name!r}, which is outside of the index's folder")
    return [(path.parent / name, tensors) for name, tensors in sorted(by_file.items())]


def _check_is_file(path: Path) -> None:
    """Raise before opening a FIFO would block, or reading a folder would fail without its name."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kind = "folder" if stat.S_ISDIR(mode) else "FIFO" if stat.S_ISFIFO(mode) else "device or socket"
        raise OSError(f"{path}: a {kind}; expected a file, which is read at offsets")


def _header_of(path: Path, descriptor: int, size: int) -> bytes:
    if size < 8:
        raise ValueError(f"{path}: {size} bytes, too few for a safetensors file; it is empty or was cut off")
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 2 <= length <= min(size - 8, _MAX_HEADER):
        raise ValueError(
            f"{path}: not a safetensors file, or cut off: {size} bytes, and a header of {length} bytes"
        )
    text = b""
    while len(text) < length:
        text += (part := os.pread(descriptor, length - len(text), 8 + len(text)))
        if not part:
            raise ValueError(f"{path}: ends inside of its header; it was cut off")
    return text


def _entries(path: Path, text: bytes, size: int, number: int) -> dict[str, Stored]:
    try:
        header: Any = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: damaged header ({error})") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path}: damaged header: a {type(header).__name__}, not an object")
    header.pop("__metadata__", None)
    base, found, ranges = 8 + len(text), {}, []
    for name, entry in header.items():
        dtype, shape, start, stop = _checked(path, name, entry)
        if base + stop > size:
            raise ValueError(
                f"{path}: {name[:200]} ends at byte {base + stop}, and the file has {size}; it was cut off"
            )
        found[name] = Stored(name, dtype, shape, number, base + start)
        if stop > start:
            ranges.append((start, stop, name))
    ranges.sort()
    for (_, stop, one), (start, _, other) in itertools.pairwise(ranges):
        if start < stop:
            raise ValueError(f"{path}: damaged header: {one[:200]} and {other[:200]} share bytes")
    return found


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{twice[:100]!r} is there twice")
    return found


def _checked(path: Path, name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    entry = entry if isinstance(entry, Mapping) else {}
    code, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    name = name[:200]
    if not isinstance(code, str) or code not in _DTYPES:
        raise ValueError(f"{path}: {name} is of dtype {repr(code)[:100]}; expected one of {sorted(_DTYPES)}")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        shape, offsets = str(shape)[:100], str(offsets)[:100]
        raise ValueError(f"{path}: damaged header: {name} has shape {shape} and data_offsets {offsets}")
    nbytes, (start, stop) = math.prod(shape) * _DTYPES[code].itemsize, offsets
    if stop - start != nbytes:
        raise ValueError(
            f"{path}: damaged header: {name}, {code} of shape {shape}, has {nbytes} bytes, and data_offsets {offsets}"
        )
    return _DTYPES[code], tuple(shape), start, stop


def _counts(value: Any) -> bool:
    """Whether it is a list of sizes or offsets that a file can have: few, and below 2^63."""
    short = isinstance(value, list) and len(value) <= _MOST_DIMS
    return short and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def library() -> Any:
    """safetensors.torch. Raises ImportError with the extra that has it."""
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("safetensors is not installed: pip install 'fsdp-runtime[export]'") from None
    return safetensors.torch
