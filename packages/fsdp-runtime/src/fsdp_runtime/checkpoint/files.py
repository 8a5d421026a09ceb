"""Safetensors files, mapped into memory: bytes are read when they are used. The library checks headers against files.

folder  ->  index or *.safetensors  ->  Stored: name, and the tensor in its file
"""

import ctypes
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ragged_shard import Box
from ragged_shard.device import CPU

Ints = tuple[int, ...]
_LONGEST_NAME = 255  # of a file


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields another path to write to; the file gets its name when the block ends, and is removed if it raises."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint.

    Attributes:
        name: as the header says.
        file: where it is.
        tensor: its bytes there, mapped and not yet read.
    """

    name: str
    file: Path
    tensor: torch.Tensor = field(compare=False, repr=False)

    @property
    def dtype(self) -> torch.dtype:
        """In the file."""
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """In the file."""
        return tuple(self.tensor.shape)


class Checkpoint:
    """The files of a checkpoint, mapped as long as one of their tensors lives. They must not be cut off meanwhile.

    Args:
        path: a `.safetensors` file, an index, or a folder with an index or with `*.safetensors`.

    Attributes:
        folder: with the files.
        tensors: what is stored, by name.
        fingerprint: of files' names and sizes, and of names, dtypes and shapes; equal where ranks see the same files.

    Raises:
        ImportError: safetensors is not installed.
        OSError: a file is missing or cannot be read.
        ValueError: a header or index that is damaged, or that does not fit its file; naming the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.folder = self.path if self.path.is_dir() else self.path.parent
        self.tensors: dict[str, Stored] = {}
        headers = hashlib.sha256()
        for file, listed in _files_of(self.path):
            tensors = _mapped(file)
            about = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
            headers.update(repr((file.name, file.stat().st_size, about)).encode())
            for name in tensors if listed is None else listed:
                self._add(name, file, tensors)
        self.fingerprint = headers.hexdigest()

    def _add(self, name: str, file: Path, tensors: dict[str, torch.Tensor]) -> None:
        if name not in tensors:
            raise ValueError(
                f"{file}: {name[:200]} is not in it, but the index lists it there; index and files belong to "
                "different checkpoints"
            )
        if name in self.tensors:
            other = self.tensors[name].file.name
            raise ValueError(f"{self.path}: {name[:200]} is in {other} and in {file.name}; expected it once")
        self.tensors[name] = Stored(name, file, tensors[name])


def _mapped(path: Path) -> dict[str, torch.Tensor]:
    safetensors = library()
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in sorted(file.keys())}
    except FileNotFoundError:
        raise
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a safetensors file, or damaged: {str(error)[:200]}") from None


def _files_of(path: Path) -> list[tuple[Path, list[str] | None]]:
    """The files, and of each the tensors that count; None: all."""
    if path.is_dir():
        indices = sorted(path.glob("*.safetensors.index.json"))
        if len(indices) > 1:
            names = [index.name for index in indices]
            raise ValueError(f"{path} has several indices {names}; pass the one to load")
        if not indices:
            files = sorted(path.glob("*.safetensors"))
            if not files:
                raise FileNotFoundError(f"{path} has no *.safetensors")
            return [(file, None) for file in files]
        path = indices[0]
    if path.suffix != ".json":
        return [(path, None)]
    content = read_json(path)
    listed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ValueError(f"{path}: no weight_map from tensor names to file names")
    by_file: dict[str, list[str]] = {}
    for tensor, name in listed.items():
        by_file.setdefault(name, []).append(tensor)
    for name in by_file:
        if len(name) > _LONGEST_NAME or not name.isprintable() or Path(name).name != name:
            raise ValueError(f"{path}: weight_map names {name[:100]!r}, which is not a file name")
    return [(path.parent / name, tensors) for name, tensors in sorted(by_file.items())]


def write_file(path: Path, content: Mapping[str, torch.Tensor], tensors: Iterator[torch.Tensor]) -> None:
    """Write one safetensors file, a tensor at a time; it has its name when it is complete.

    Args:
        content: what the file has, by name, on meta.
        tensors: their values in that order; more may follow.

    Raises:
        ValueError: a dtype that files do not have; naming the tensor.
        OSError: the file cannot be written.
    """
    header = header_of(content)
    with atomic_write(path) as unfinished, unfinished.open("wb") as file:
        file.write(header)
        for name, like in content.items():
            tensor = next(tensors)
            if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
                raise ValueError(
                    f"{name} is {tensor.dtype} of {tensor.shape}; expected {like.dtype} of {like.shape}"
                )
            flat = tensor.to(CPU).reshape(-1)
            if flat.nbytes:
                file.write((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()))
            del tensor, flat  # before the next is made


def header_of(content: Mapping[str, torch.Tensor]) -> bytes:
    """The header of a safetensors file whose tensors follow one another in this order, for the bytes after it.

    Raises:
        ValueError: a dtype that files do not have; naming the tensor.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, tensor in content.items():
        end = begin + tensor.nbytes
        entries[name] = {
            "dtype": _code(name, tensor.dtype),
            "shape": tuple(tensor.shape),
            "data_offsets": (begin, end),
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(8, "little") + text


def _code(name: str, dtype: torch.dtype) -> str:
    """A dtype as the library writes it."""
    try:
        saved = library().torch.save({"x": torch.empty(0, dtype=dtype)})
    except KeyError:
        raise ValueError(f"{name} is {dtype}, which safetensors files do not have; pass dtype") from None
    return str(json.loads(saved[8:])["x"]["dtype"])


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises ValueError or OSError with its path."""
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({str(error)[:200]})") from None


def library() -> Any:
    """safetensors. Raises ImportError with the extra that has it."""
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("safetensors is not installed: pip install 'fsdp-runtime[export]'") from None
    return safetensors


def whole(shape: Ints) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), shape)
