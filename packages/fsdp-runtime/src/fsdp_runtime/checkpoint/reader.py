"""Reads DCP folders without running code of theirs, and refuses damaged ones by name."""

import io
import operator
import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ragged_shard import Box

METADATA = ".metadata"
# Names in torch's `.metadata`; classes of torch.distributed.checkpoint.metadata, dtypes and paths are in addition.
_NAMES = {
    "collections.OrderedDict",
    "torch.Size",
    "torch.serialization._get_layout",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
}


class Reader(FileSystemReader):
    """DCP's reader that runs no code of a pickle: its metadata, read once, has the names of `_NAMES` only."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read ``.metadata``.

        Raises:
            OSError: it is missing.
            ValueError: it is damaged, has another name or type, or does not have each element of a tensor once.
        """
        if self._metadata is None:
            content = (Path(self.path) / METADATA).read_bytes()
            try:
                made: Metadata = _Unpickler(io.BytesIO(content)).load()
                for name, about in made.state_dict_metadata.items():
                    if isinstance(about, TensorStorageMetadata):
                        _check_tensor(name, about)
                _check_paths(made.planner_data)
            except Exception as error:  # a damaged pickle raises anything
                raise ValueError(f"{METADATA}: damaged: {type(error).__name__}: {error}") from error
            self._metadata = made
        return self._metadata


def _check_paths(paths: Any) -> None:
    """Raise ValueError unless `planner_data` has a path for each key: torch does not look at it."""
    if not isinstance(paths or {}, dict):
        raise ValueError(f"planner_data is {paths!r:.100}; expected a dict from keys to paths")
    for key, path in (paths or {}).items():
        if not isinstance(path, tuple) or not path:
            raise ValueError(f"planner_data of {key} is {path!r:.100}; expected a tuple of keys and indices")


def _check_tensor(name: str, about: TensorStorageMetadata) -> None:
    """Raise ValueError unless a tensor has a dtype, and each element is in one chunk.

    torch would leave the other elements uninitialised.
    """
    dtype = getattr(about.properties, "dtype", None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has the dtype {dtype!r:.100}; expected a torch.dtype")
    whole, covered = Box((0,) * len(about.size), tuple(about.size)), 0
    open_ones: list[Box] = []  # which reach beyond where the next chunk begins, along the first dimension
    for box in sorted((Box(tuple(c.offsets), tuple(c.sizes)) for c in about.chunks), key=lambda b: b.offsets):
        if not box.numel:
            continue
        if whole.intersection(box) != box:
            raise ValueError(f"a chunk of {name} at {box.offsets} of {box.sizes} is not inside {whole.sizes}")
        open_ones = [b for b in open_ones if not box.sizes or b.offsets[0] + b.sizes[0] > box.offsets[0]]
        if any(b.intersection(box) for b in open_ones):
            raise ValueError(f"{name} has elements of the chunk at {box.offsets} of {box.sizes} twice")
        open_ones.append(box)
        covered += box.numel
    if covered != whole.numel:
        raise ValueError(f"chunks of {name} have {covered} elements; expected {whole.numel}")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in _NAMES:
            return super().find_class(module, name)
        if module in ("pathlib", "pathlib._local") and name.endswith("Path"):
            return pathlib.PurePath  # where it was saved, on any system
        if (module, name) == ("builtins", "getattr"):
            return operator.getitem  # Python before 3.11.4 pickles a member of an enum as getattr(enum, name)
        value = vars(metadata if module == metadata.__name__ else torch).get(name)
        if isinstance(value, torch.dtype) or getattr(value, "__module__", None) == metadata.__name__:
            return value
        raise ValueError(f"it names {module}.{name}, which is not part of a checkpoint")
