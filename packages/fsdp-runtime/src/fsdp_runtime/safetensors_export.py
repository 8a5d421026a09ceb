"""The whole model as safetensors files, named and split as Hugging Face's loaders expect them."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer import BlockFP8
from ragged_shard import CPU, RaggedDTensor

from .safetensors_fp8 import SCALES, formats_of, quantize_whole, quantized_nbytes, write_config

Entry = tuple[str, torch.Tensor, BlockFP8 | None]  # name, tensor, and what its codes are written in
INDEX = "model.safetensors.index.json"
# What wrappers put into names: torch's activation checkpointing and torch.compile.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def save_safetensors(
    module: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5_000_000_000,
    quantized: bool = False,
) -> list[Path]:
    """Write the full parameters and buffers of a module, sharded or not; every rank calls it.

    Tensor by tensor each is gathered (one all-gather; nothing for what is not sharded) and rank 0 writes it, so
    that at most one full tensor is on a device and one file in rank 0's memory. One file is `model.safetensors`;
    several are `model-00001-of-0000N.safetensors` with `model.safetensors.index.json`. Of tied parameters the first
    name is written. Files are complete under their names or not there.

    Args:
        module: with the names that the files should have.
        folder: made where it is missing.
        dtype: of floating-point tensors in the files; None: as they are.
        max_file_bytes: begin a new file before one gets larger (a larger tensor has a file to itself).
        quantized: write weights that are gathered in e4m3 (`QuantizationPolicy(weights=BlockFP8(...))`) so, in the
            published layout: `X` in e4m3 and `X_scale_inv`, and `quantization_config` in the folder's `config.json`
            (call it after the model's own config was saved there). `read_safetensors` reads it.

    Returns:
        The files, on every rank.

    Raises:
        OSError: rank 0 could not write; on every rank, naming the folder.
        ValueError: `quantized`, and no weight is gathered in e4m3, or tiles differ.
    """
    formats = formats_of(module) if quantized else {}
    entries = _entries(module, formats)
    sizes = [_nbytes(entry, dtype) for entry in entries]
    bins = _split(sizes, max_file_bytes)
    folder = Path(folder)
    names = [_file_name(number, len(bins)) for number in range(len(bins))]
    problem = _attempt(lambda: folder.mkdir(parents=True, exist_ok=True))
    for name, members in zip(names, bins, strict=True):
        content = dict(_gathered([entries[i] for i in members], dtype))
        if problem is None and content:
            problem = _attempt(lambda content=content, name=name: _write(content, folder / name))
    if problem is None and len(bins) > 1 and _is_writer():
        where = {}
        for name, members in zip(names, bins, strict=True):
            for key, _, fmt in [entries[i] for i in members]:
                where.update(dict.fromkeys([key] if fmt is None else [key, key + SCALES], name))
        problem = _attempt(lambda: _write_index(where, sum(sizes), folder))
    if problem is None and formats:
        problem = _attempt(lambda: write_config(module, formats, folder))
    problem = _tell(problem)
    if problem is not None:
        raise OSError(f"save_safetensors: rank 0 could not write to {folder}: {problem}")
    return [folder / name for name in names]


def _entries(module: nn.Module, formats: dict[int, BlockFP8]) -> list[Entry]:
    found: list[Entry] = []
    seen: set[int] = set()
    for key, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor) or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        for wrapper in _WRAPPERS:
            key = key.replace(wrapper, "")
        found.append((key, tensor.detach(), formats.get(id(tensor))))
    return found


def _nbytes(entry: Entry, dtype: torch.dtype | None) -> int:
    _, tensor, fmt = entry
    if fmt is not None:
        return quantized_nbytes(tensor.shape, fmt)
    size = dtype.itemsize if dtype is not None and tensor.is_floating_point() else tensor.dtype.itemsize
    return tensor.numel() * size


def _split(sizes: list[int], limit: int) -> list[list[int]]:
    bins: list[list[int]] = [[]]
    filled = 0
    for index, size in enumerate(sizes):
        if bins[-1] and filled + size > limit:
            bins.append([])
            filled = 0
        bins[-1].append(index)
        filled += size
    return bins


def _gathered(entries: list[Entry], dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Full tensors on the CPU, on the writer; the others only take part."""
    for key, tensor, fmt in entries:
        with torch.no_grad():
            full = tensor.full_tensor() if isinstance(tensor, (DTensor, RaggedDTensor)) else tensor
        if _is_writer() and fmt is not None:
            yield from quantize_whole(key, full, fmt)
        elif _is_writer():
            wanted = dtype if dtype is not None and full.is_floating_point() else full.dtype
            yield key, full.to(CPU, wanted).contiguous()


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _write(content: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    unfinished = path.with_suffix(".unfinished")
    try:
        save_file(content, unfinished, metadata={"format": "pt"})
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _write_index(where: dict[str, str], total: int, folder: Path) -> None:
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True)
    unfinished = folder / f"{INDEX}.unfinished"
    unfinished.write_text(text + "\n")
    os.replace(unfinished, folder / INDEX)


def _is_writer() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _attempt(act: Any) -> str | None:
    """Do something on the writer; what went wrong, in words."""
    if not _is_writer():
        return None
    try:
        act()
    except Exception as error:  # whatever it is, the other ranks must hear of it, not wait
        return f"{type(error).__name__}: {error}"
    return None


def _tell(problem: str | None) -> str | None:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return problem
    said = [problem]
    dist.broadcast_object_list(said, src=0)
    return said[0]
