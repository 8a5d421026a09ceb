"""`convert_checkpoint`, `fsdp-convert`: DCP folders to safetensors and back, without the model.

DCP (ours, FSDP2's, torchtitan's)  --dcp.load-->  a few tensors in CPU memory  -->  appended to a safetensors file
safetensors                        --mapped-->    one tensor at a time         -->  dcp.save

`Reader` reads DCP folders without running code of theirs, and refuses damaged ones by name.
"""

import argparse
import io
import logging
import operator
import os
import pathlib
import pickle
import shutil
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ragged_shard import Box
from ragged_shard.device import CPU

from .files import Checkpoint, library, split_by_size, split_into_files, write_files

_log = logging.getLogger(__name__)
METADATA = ".metadata"
_CODES, _SCALES = ".codes", ".scales"  # parts of a weight at rest, X.codes and X.scales
_BIN = 1 << 24  # bytes that are loaded at a time; a larger tensor alone
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Names in torch's `.metadata`; classes of torch.distributed.checkpoint.metadata, dtypes and paths are in addition.
_NAMES = {
    "collections.OrderedDict",
    "torch.Size",
    "torch.serialization._get_layout",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
}


def convert_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    entry: str | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> list[str]:
    """Convert a checkpoint in one process: no process group, no GPU, no model. Returns the names of the tensors.

    Takes about three times the memory of the largest tensor, or of 16 MiB. Other tensors than the model's, such as an
    optimizer's, are left out. So are entries of the model that are no tensors (``_extra_state``), which files cannot
    hold; their names are logged.

    Args:
        source: a DCP folder, written by any number of ranks of any system, which becomes safetensors; or safetensors
            files, which become a DCP folder.
        destination: a folder that does not exist, or is empty. It appears when it is complete.
        dtype: of floating-point tensors in the destination, except scales of weights that are kept as codes. Defaults
            to theirs.
        entry: of the DCP state dict, the model's state dict, such as "model" or "app.model". Of a source it defaults to
            "model" if there is one, else to the tensors at the top; of a destination to the top, as torchtitan and
            `dcp.save(model.state_dict())` write them.
        max_file_bytes: of one safetensors file; a larger tensor has a file to itself.

    Raises:
        FileExistsError: the destination is not empty.
        OSError, ValueError, ImportError: a source that is missing, damaged, or without such an entry; a dtype that the
            destination does not have; by name.
    """
    source, destination = Path(source), Path(destination).absolute()
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise FileExistsError(f"{destination} is there and not empty; expected a new folder")
    unfinished = destination.with_name(f"{destination.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        with warnings.catch_warnings():  # one process saves and loads, as intended
            warnings.simplefilter("ignore", UserWarning)
            if (source / METADATA).exists():
                names = _to_safetensors(source, unfinished, dtype, entry, max_file_bytes)
            else:
                names = _to_dcp(source, unfinished, dtype, entry)
        os.replace(unfinished, destination)
    except CheckpointException as error:  # it does not derive from Exception
        cause = error.failures[0][0]
        raise ValueError(f"{source}: damaged: {type(cause).__name__}: {cause}") from cause
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return names


def _to_safetensors(
    source: Path, folder: Path, dtype: torch.dtype | None, entry: str | None, limit: int
) -> list[str]:
    reader = Reader(source)
    keys = _keys_of_model(reader.read_metadata(), entry, source)
    stored = {
        name: torch.empty(about.size, dtype=about.properties.dtype, device="meta")
        for name, (_, about) in keys.items()
    }
    made = {name: tensor.to(_cast(name, tensor.dtype, dtype, stored)) for name, tensor in stored.items()}
    names, nbytes = list(made), [tensor.nbytes for tensor in made.values()]

    def tensors() -> Iterator[torch.Tensor]:
        for part in split_by_size(nbytes, _BIN):
            chosen = [names[index] for index in part]
            state = {keys[name][0]: torch.empty_like(stored[name], device=CPU) for name in chosen}
            dcp_load(state, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
            yield from (state.pop(keys[name][0]).to(made[name].dtype) for name in chosen)

    files = split_into_files(folder, [{name: tensor} for name, tensor in made.items()], limit)
    write_files(folder, files, tensors())
    return names


def _keys_of_model(
    metadata: Metadata, entry: str | None, source: Path
) -> dict[str, tuple[str, TensorStorageMetadata]]:
    """Keys in DCP's flat state dict and descriptions of a model's tensors, by their names in the model."""
    by_path = {
        tuple(map(str, (metadata.planner_data or {}).get(key, (key,)))): (key, about)
        for key, about in metadata.state_dict_metadata.items()
    }
    tensors = {path for path, (_, about) in by_path.items() if isinstance(about, TensorStorageMetadata)}
    roots = {path[0] if len(path) > 1 else "tensors at the top" for path in tensors}
    if entry is None:
        entry = "model" if "model" in roots else ""
    names: dict[str, tuple[str, TensorStorageMetadata]] = {}
    others = []
    for path, (key, about) in by_path.items():
        if not (".".join(path).startswith(f"{entry}.") if entry else len(path) == 1):
            continue
        name = ".".join(path).removeprefix(f"{entry}.")
        if isinstance(about, TensorStorageMetadata):
            names[name] = key, about
        else:
            others.append(name)
    if not names:
        raise ValueError(
            f"{source} has no tensors in the entry {entry!r} of its state dict; it has {sorted(roots)}"
        )
    if others:
        _log.warning("%s: left out, as files hold tensors only: %s", source, ", ".join(sorted(others)))
    return names


def _cast(name: str, stored: torch.dtype, dtype: torch.dtype | None, names: Collection[str]) -> torch.dtype:
    """The dtype of a tensor in the destination; ``names`` are those of all tensors of the source."""
    scales = name.endswith(_SCALES) and name.removesuffix(_SCALES) + _CODES in names
    if dtype is None or not stored.is_floating_point or scales:
        return stored
    if stored.itemsize == 1:
        raise ValueError(f"{name} is {stored}, whose scales are another tensor: not cast; leave out dtype")
    return dtype


class _Planner(DefaultSavePlanner):
    """DCP's planner for a state dict on meta, whose tensors are read from files when they are written."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        super().__init__()
        self._checkpoint, self._prefix = checkpoint, prefix

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """The tensor, mapped separately, so that its pages are unmapped once it is written."""
        name, like = index.fqn.removeprefix(self._prefix), super().lookup_object(index)
        with library().safe_open(self._checkpoint.files[name], framework="pt") as file:
            values: torch.Tensor = file.get_tensor(name).to(like.dtype)
        return values


def _to_dcp(source: Path, folder: Path, dtype: torch.dtype | None, entry: str | None) -> list[str]:
    checkpoint = Checkpoint(source)
    state: dict[str, Any] = {
        name: torch.empty(
            tensor.shape, dtype=_cast(name, tensor.dtype, dtype, checkpoint.tensors), device="meta"
        )
        for name, tensor in checkpoint.tensors.items()
    }
    for key in reversed(entry.split(".") if entry else []):
        state = {key: state}
    planner = _Planner(checkpoint, f"{entry}." if entry else "")
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)  # a tensor at a time, also where CUDA is
    dcp_save(state, storage_writer=writer, planner=planner, no_dist=True)
    return list(checkpoint.tensors)


class Reader(FileSystemReader):
    """DCP's reader that runs no code of a pickle: its metadata, read once, has the names of `_NAMES` only."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read ``.metadata``; raises OSError if it is missing, and ValueError if it is damaged.

        That is: it has another name or type, or does not have each element of a tensor once.
        """
        if self._metadata is None:
            content = (Path(self.path) / METADATA).read_bytes()
            try:
                made: Metadata = _Unpickler(io.BytesIO(content)).load()
                for name, about in made.state_dict_metadata.items():
                    if isinstance(about, TensorStorageMetadata):
                        _check_tensor(name, about)
                _check_paths(made.planner_data or {})
            except Exception as error:  # a damaged pickle raises anything
                raise ValueError(f"{METADATA}: damaged: {type(error).__name__}: {error}") from error
            self._metadata = made
        return self._metadata


def _check_paths(paths: Any) -> None:
    """Raise ValueError unless `planner_data` has a path for each key: torch does not look at it."""
    if not isinstance(paths, dict):
        raise ValueError(f"planner_data is {paths!r:.100}; expected a dict from keys to paths")
    for key, path in paths.items():
        if not isinstance(path, tuple) or not path:
            raise ValueError(f"planner_data of {key} is {path!r:.100}; expected a tuple of keys and indices")


def _check_tensor(name: str, about: TensorStorageMetadata) -> None:
    """Raise ValueError unless a tensor has a dtype, and each element is in one chunk: torch would not set others."""
    dtype = getattr(about.properties, "dtype", None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has the dtype {dtype!r:.100}; expected a torch.dtype")
    whole, covered = Box((0,) * len(about.size), tuple(about.size)), 0
    open_ones: list[Box] = []  # which reach beyond where the next chunk begins, along the first dimension
    boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in about.chunks]
    for box in sorted((box for box in boxes if box.numel), key=lambda box: box.offsets):
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
        value = vars(dcp_metadata if module == dcp_metadata.__name__ else torch).get(name)
        if isinstance(value, torch.dtype) or getattr(value, "__module__", None) == dcp_metadata.__name__:
            return value
        raise ValueError(f"it names {module}.{name}, which is not part of a checkpoint")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``fsdp-convert``; returns the exit status: 0, or 2 for an error."""
    parser = argparse.ArgumentParser(
        prog="fsdp-convert",
        description="Convert a checkpoint, torch.distributed.checkpoint <-> safetensors, without the model. Reads "
        "folders of fsdp_runtime, FSDP2 and torchtitan.",
    )
    parser.add_argument("source", help="a DCP folder, or safetensors: a file, an index or a folder")
    parser.add_argument("destination", help="a new folder, of the other form")
    parser.add_argument("--dtype", choices=_DTYPES, help="of floating-point tensors (default: theirs)")
    parser.add_argument("--entry", help="of DCP's state dict with the model, such as model or app.model")
    options = parser.parse_args(argv)
    try:
        names = convert_checkpoint(
            options.source, options.destination, entry=options.entry, dtype=_DTYPES.get(options.dtype)
        )
    except (OSError, ValueError, ImportError) as error:
        print(f"fsdp-convert: {error}", file=sys.stderr)
        return 2
    print(f"{options.destination}: {len(names)} tensors")
    return 0
