"""Safetensors files: read, mapped into memory, and written a tensor at a time, named as Hugging Face's loaders expect.

folder  ->  index or *.safetensors  ->  mapped tensors by name  ->  values of a box

Bytes are read when they are used. The library checks headers against files. FP8 weights are `X` in e4m3 and
`X_scale_inv` with a scale for each tile; `config.json` has the size of tiles.
"""

import ctypes
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ragged_shard import Box
from ragged_shard.device import CPU

Ints = tuple[int, ...]
SCALES = "_scale_inv"
_INDEX = "model.safetensors.index.json"
_WRITTEN = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|" + re.escape(_INDEX))


class Checkpoint:
    """The files of a checkpoint, mapped as long as one of their tensors lives. They must not be cut off meanwhile.

    Takes a path and raises errors as `read_safetensors`, here only of headers and indices.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.tensors: dict[str, torch.Tensor] = {}  # the stored tensors by name, mapped and not yet read
        self.files: dict[str, Path] = {}  # the file of each
        headers = hashlib.sha256()
        for file, listed in _files_of(self.path):
            tensors = _mapped(file)
            about = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
            headers.update(repr((file.name, file.stat().st_size, about)).encode())
            for name in tensors if listed is None else listed:
                if name not in tensors:
                    raise ValueError(
                        f"{file}: {name[:200]} is not in it, but the index lists it there; index and files belong to "
                        "different checkpoints"
                    )
                if name in self.tensors:
                    both = f"{self.files[name].name} and in {file.name}"
                    raise ValueError(f"{self.path}: {name[:200]} is in {both}; expected it once")
                self.tensors[name], self.files[name] = tensors[name], file
        # of files' names and sizes, and of names, dtypes and shapes; equal where ranks see the same files
        self.fingerprint = headers.hexdigest()

    def decoder(self, name: str) -> Callable[[Box], torch.Tensor]:
        """A function that reads a box of an e4m3 tensor, multiplied by the scales of its tiles, in fp32.

        Raises ValueError, by name, if it has no scales, or those of other tiles than the folder's `config.json` says.
        """
        codes, scales, file = self.tensors[name], self.tensors.get(name + SCALES), self.files[name]
        if scales is None:
            raise ValueError(f"{name} is e4m3, and there is no {name}{SCALES} to multiply it with, in {file}")
        path = file.parent / "config.json"
        size: Any = _read_json(path) if path.exists() else {}
        for key in ("quantization_config", "weight_block_size"):
            size = size.get(key) if isinstance(size, dict) else None
        if not isinstance(size, list) or [type(number) for number in size] != [int, int] or min(size) < 1:
            raise ValueError(
                f"{path}: quantization_config.weight_block_size is {str(size)[:200]}; expected [rows, columns] of a "
                "tile"
            )
        tiles = [-(-length // step) for length, step in zip(codes.shape[-2:], size, strict=False)]
        expected = (*codes.shape[:-2], *tiles)
        if codes.ndim < 2 or tuple(scales.shape) != expected or not scales.is_floating_point():
            raise ValueError(
                f"{name}{SCALES} is {scales.dtype} of shape {tuple(scales.shape)}; expected {expected} for tiles of "
                f"{size}"
            )

        def values(box: Box) -> torch.Tensor:
            *above, rows, columns = box.slices()
            row_tiles = torch.arange(rows.start, rows.stop) // size[0]
            column_tiles = torch.arange(columns.start, columns.stop) // size[1]
            factors = scales[tuple(above)][..., row_tiles[:, None], column_tiles].float()
            return codes[box.slices()].float().mul_(factors)

        return values


def read_safetensors(
    path: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """The tensors of safetensors files, for `load_state_dict`; FP8 weights are read back from their codes.

    On the CPU, on every rank that calls it; communicates nothing.

    Args:
        path: a `.safetensors` file, an index, or a folder with an index or with `*.safetensors`; where weights are FP8
            next to a `config.json` that has `weight_block_size`.
        dtype: of weights that were FP8.

    Raises:
        ValueError: an FP8 weight without scales, or with scales of another shape than `weight_block_size` says; or a
            file or index that is damaged, or does not fit the other; by name.
        OSError: a file is missing or cannot be read.
        ImportError: safetensors is not installed.
    """
    checkpoint = Checkpoint(path)
    tensors = dict(checkpoint.tensors)
    for name, codes in checkpoint.tensors.items():
        if codes.dtype == torch.float8_e4m3fn:
            whole = Box((0,) * codes.dim(), tuple(codes.shape))
            tensors[name] = checkpoint.decoder(name)(whole).to(dtype)
            del tensors[name + SCALES]
    return tensors


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
    """The files, each with the tensors that count; None: all."""
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
    content = _read_json(path)
    listed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(listed, dict):
        raise ValueError(f"{path}: no weight_map from tensor names to file names")
    by_file: dict[str, list[str]] = {}
    for tensor, name in listed.items():
        if not isinstance(name, str) or len(name) > 255 or not name.isprintable() or Path(name).name != name:
            raise ValueError(f"{path}: weight_map names {str(name)[:100]!r}, which is not a file name")
        by_file.setdefault(name, []).append(tensor)
    return [(path.parent / name, tensors) for name, tensors in sorted(by_file.items())]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({str(error)[:200]})") from None


def write_files(
    folder: Path, files: Mapping[Path, Mapping[str, torch.Tensor]], tensors: Iterator[torch.Tensor]
) -> None:
    """Write safetensors files, and the index of several, a tensor at a time, in place of an earlier export's.

    Each has its name when it is complete. Raises ValueError for a dtype that files do not have before anything is
    changed, naming the tensor.

    Args:
        folder: of the index; made where it is missing.
        files: content of each, on meta.
        tensors: their values, in that order.
    """
    headers = [_header_of(content) for content in files.values()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.iterdir(), reverse=True):  # the index before the files that it names
        if _WRITTEN.fullmatch(path.name) and [path] != list(files):
            path.unlink()
    for (path, content), header in zip(files.items(), headers, strict=True):
        with _atomic_write(path) as file:
            file.write(header)
            for name, like in content.items():
                _write_tensor(file, name, like, next(tensors))
    if len(files) > 1:
        total = sum(tensor.nbytes for content in files.values() for tensor in content.values())
        where = {name: path.name for path, content in files.items() for name in content}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True)
        with _atomic_write(folder / _INDEX) as file:
            file.write(f"{text}\n".encode())


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
        place, dtype = (begin, begin + tensor.nbytes), _code(name, tensor.dtype)
        entries[name] = {"dtype": dtype, "shape": tuple(tensor.shape), "data_offsets": place}
        begin += tensor.nbytes
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
def _atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which gets its name when the block ends, and is removed if it raises."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            yield file
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def library() -> Any:
    """safetensors. Raises ImportError with the command that installs it."""
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("safetensors is not installed: pip install safetensors") from None
    return safetensors
