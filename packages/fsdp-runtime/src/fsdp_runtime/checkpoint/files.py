"""Safetensors files, mapped into memory: bytes are read when they are used. The library checks headers against files.

folder  ->  index or *.safetensors  ->  mapped tensors by name  ->  values of a box

FP8 weights are `X` in e4m3 and `X_scale_inv` with a scale for each tile; `config.json` has the size of tiles.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ragged_shard import Box

Ints = tuple[int, ...]
SCALES = "_scale_inv"
_LONGEST_NAME = 255  # of a file


class Checkpoint:
    """The files of a checkpoint, mapped as long as one of their tensors lives. They must not be cut off meanwhile.

    Args:
        path: a `.safetensors` file, an index, or a folder with an index or with `*.safetensors`.

    Attributes:
        tensors: the stored tensors by name, mapped and not yet read.
        files: the file of each.
        fingerprint: of files' names and sizes, and of names, dtypes and shapes; equal where ranks see the same files.

    Raises:
        ImportError: safetensors is not installed.
        OSError: a file is missing or cannot be read.
        ValueError: a header or index that is damaged, or that does not fit its file; naming the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.tensors: dict[str, torch.Tensor] = {}
        self.files: dict[str, Path] = {}
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
        self.fingerprint = headers.hexdigest()

    def decoder(self, name: str) -> Callable[[Box], torch.Tensor]:
        """A function that reads a box of an e4m3 tensor, multiplied by the scales of its tiles, in fp32.

        Raises:
            ValueError: it has no scales, or scales of other tiles than the folder's `config.json` says; by name.
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
            *above, row, column = box.slices()
            of_rows, of_columns = (
                torch.arange(at.start, at.stop) // step for at, step in zip((row, column), size, strict=True)
            )
            factors = scales[tuple(above)][..., of_rows[:, None], of_columns].float()
            return codes[box.slices()].float().mul_(factors)

        return values


def read_safetensors(
    path: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """The tensors of safetensors files, for `load_state_dict`; FP8 weights are read back from their codes.

    On the CPU, on every rank that calls it; communicates nothing.

    Args:
        path: a `.safetensors` file, an index, or a folder with either; where weights are FP8 next to a `config.json`
            that has `weight_block_size`.
        dtype: of weights that were FP8.

    Raises:
        ValueError: an FP8 weight without scales, or with scales of another shape than `weight_block_size` says; or a
            damaged file; by name.
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
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ValueError(f"{path}: no weight_map from tensor names to file names")
    by_file: dict[str, list[str]] = {}
    for tensor, name in listed.items():
        by_file.setdefault(name, []).append(tensor)
    for name in by_file:
        if len(name) > _LONGEST_NAME or not name.isprintable() or Path(name).name != name:
            raise ValueError(f"{path}: weight_map names {name[:100]!r}, which is not a file name")
    return [(path.parent / name, tensors) for name, tensors in sorted(by_file.items())]


def _read_json(path: Path) -> Any:
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
