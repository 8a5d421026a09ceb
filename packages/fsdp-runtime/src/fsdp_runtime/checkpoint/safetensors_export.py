"""The whole model as safetensors files, named and split as Hugging Face's loaders expect them."""

import ctypes
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import nn

from ragged_shard.device import CPU
from ragged_shard.dist import gather_from_ranks

from .conversions import FileGroups
from .export import Exporter, on_meta
from .files import library
from .merged import Merged, base_of

INDEX = "model.safetensors.index.json"
_FILES = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|" + re.escape(INDEX))
_CALLER = "save_safetensors"


def save_safetensors(
    module: nn.Module | Merged,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5_000_000_000,
    bucket_bytes: int = 1 << 30,
) -> list[Path]:
    """Write the full parameters and buffers of a module, sharded or not; every rank calls it.

    Tensors are gathered as in `iter_full_params`, on rank 0 alone, which writes them one by one: memory is at most
    `bucket_bytes` on any rank. One file is `model.safetensors`; several are `model-00001-of-0000N.safetensors` with
    `model.safetensors.index.json`. Of tied parameters the first name is written. Files are complete under their names
    or not there. Files of an earlier export into the folder are removed first: loaders would take its index or its
    single file for the new weights. One `model.safetensors` replaces another when it is complete.

    Args:
        module: with the names that the files should have; of a transformers model the files have the names and forms
            that its `save_pretrained` writes, and tensors that it converts together are on rank 0's CPU together. Or
            `merged_params` of it.
        folder: made where it is missing.
        dtype: of floating-point tensors in the files; None: as they are.
        max_file_bytes: begin a new file before one gets larger (a larger tensor has a file to itself).
        bucket_bytes: of memory for gathered tensors; see `iter_full_params`.

    Returns:
        The files, on every rank.

    Raises:
        OSError: rank 0 could not write: the folder, the disk, a dtype that files do not have, safetensors not
            installed; on every rank, naming the folder.
    """
    folder, problem = Path(folder), ""
    exporter = Exporter(module, dtype, bucket_bytes, (0,), buffers=True, caller=_CALLER)
    groups = FileGroups(base_of(module), on_meta(exporter.entries, dtype))
    files = split_into_files(folder, groups.made, max_file_bytes)
    tensors = exporter.tensors()
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            # `map` keeps no tensor while the next is gathered
            write_files(folder, files, map(itemgetter(1), groups.in_file_form(tensors, CPU)))
        except Exception as error:  # the other ranks must not wait for this one
            problem = f"{type(error).__name__}: {error}"
    for _ in tensors:  # to the end, on every rank
        pass
    problem = gather_from_ranks(problem)[0]
    if problem:
        raise OSError(f"{_CALLER}: rank 0 could not write to {folder}: {problem}")
    return list(files)


def write_files(
    folder: Path, files: Mapping[Path, Mapping[str, torch.Tensor]], tensors: Iterator[torch.Tensor]
) -> None:
    """Write safetensors files, and the index of several, a tensor at a time, in place of an earlier export's.

    Each has its name when it is complete.

    Args:
        folder: folder of the index; made where it is missing.
        files: content of each, on meta.
        tensors: their values, in that order.

    Raises:
        ValueError: a dtype that files do not have, before anything is changed; naming the tensor.
        OSError: a file cannot be written.
    """
    headers = [_header_of(content) for content in files.values()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.iterdir(), reverse=True):  # the index before the files that it names
        if _FILES.fullmatch(path.name) and [path] != list(files):
            path.unlink()
    for (path, content), header in zip(files.items(), headers, strict=True):
        with _atomic_write(path) as unfinished, unfinished.open("wb") as file:
            file.write(header)
            for name, like in content.items():
                _write_tensor(file, name, like, next(tensors))
    if len(files) > 1:
        total = sum(tensor.nbytes for content in files.values() for tensor in content.values())
        where = {name: path.name for path, content in files.items() for name in content}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True)
        with _atomic_write(folder / INDEX) as unfinished:
            unfinished.write_text(text + "\n")


def _write_tensor(file: BinaryIO, name: str, like: torch.Tensor, tensor: torch.Tensor) -> None:
    found, expected = (tensor.dtype, tensor.shape), (like.dtype, like.shape)
    if found != expected:
        raise ValueError(f"{name} is {found}; expected {expected}")
    flat = tensor.to(CPU).reshape(-1)
    if flat.nbytes:
        file.write((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()))


def split_into_files(
    folder: Path, groups: Sequence[Mapping[str, torch.Tensor]], limit: int
) -> dict[Path, dict[str, torch.Tensor]]:
    """Consecutive groups of tensors in files of at most `limit` bytes, with Hugging Face's names for them."""
    bins = split_by_size([sum(tensor.nbytes for tensor in group.values()) for group in groups], limit)
    several = [f"model-{number:05d}-of-{len(bins):05d}.safetensors" for number in range(1, len(bins) + 1)]
    names = several if len(bins) > 1 else ["model.safetensors"]
    return {
        folder / name: {key: tensor for index in members for key, tensor in groups[index].items()}
        for name, members in zip(names, bins, strict=True)
    }


def split_by_size(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Indices in consecutive bins of at most `limit` bytes; a larger tensor has a bin to itself."""
    bins: list[list[int]] = [[]]
    filled = 0
    for index, size in enumerate(sizes):
        if bins[-1] and filled + size > limit:
            bins.append([])
            filled = 0
        bins[-1].append(index)
        filled += size
    return bins


def _header_of(content: Mapping[str, torch.Tensor]) -> bytes:
    """The header of a file whose tensors follow one another in this order, for the bytes after it."""
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


@contextmanager
def _atomic_write(path: Path) -> Iterator[Path]:
    """Yields another path to write to; the file gets its name when the block ends, and is removed if it raises."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
