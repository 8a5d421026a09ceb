"""The whole model as safetensors files, named and split as Hugging Face's loaders expect them."""

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dbuffer import BlockFP8
from ragged_shard import CPU, gather_from_ranks

from .conversions import FileForm
from .entries import Entry
from .export import Exporter
from .files import atomic_write, library
from .fp8_files import SCALES
from .safetensors_fp8 import formats_of, quantize_whole, write_config

INDEX = "model.safetensors.index.json"
_CALLER = "save_safetensors"


def save_safetensors(
    module: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5_000_000_000,
    bucket_bytes: int = 1 << 30,
    quantized: bool = False,
) -> list[Path]:
    """Write the full parameters and buffers of a module, sharded or not; every rank calls it.

    Tensors come as those of `iter_full_params`, to rank 0 alone: memory for it is at most `bucket_bytes` on any rank,
    and one file on rank 0's CPU. One file is `model.safetensors`; several are
    `model-00001-of-0000N.safetensors` with `model.safetensors.index.json`. Of tied parameters the first name is
    written. Files are complete under their names or not there.

    Args:
        module: with the names that the files should have; of a transformers model the files have the names and forms
            that its `save_pretrained` writes, and tensors that it converts together are on rank 0's CPU together.
        folder: made where it is missing.
        dtype: of floating-point tensors in the files; None: as they are.
        max_file_bytes: begin a new file before one gets larger (a larger tensor has a file to itself).
        bucket_bytes: of memory for gathered tensors; see `iter_full_params`.
        quantized: write weights that are gathered in e4m3 (`QuantizationPolicy(weights=BlockFP8(...))`) so, in the
            published layout: `X` in e4m3 and `X_scale_inv`, and `quantization_config` in the folder's `config.json`
            (call it after the model's own config was saved there). `read_safetensors` reads it.

    Returns:
        The files, on every rank.

    Raises:
        OSError: rank 0 could not write: the folder, the disk, a dtype that files do not have, safetensors not
            installed; on every rank, naming the folder.
        ValueError: `quantized`, and no weight is gathered in e4m3, or tiles differ.
    """
    formats = formats_of(module) if quantized else {}

    def fmt_of(entry: Entry) -> BlockFP8 | None:
        return None if entry.param is None else formats.get(id(entry.param.sharded))

    form = FileForm(module)
    exporter = Exporter(
        module, dtype, bucket_bytes, (0,), buffers=True, caller=_CALLER, keep=lambda e: fmt_of(e) is not None
    )
    entries = {entry.name: entry for entry in exporter.entries}
    place = {name: number for number, name in enumerate(entries)}
    groups = sorted(form.groups(list(entries)), key=lambda group: place[group[-1]])  # as they are complete
    sizes = [_sizes(form, [entries[name] for name in group], exporter.dtype_of, fmt_of) for group in groups]
    bins = _split([sum(content.values()) for content in sizes], max_file_bytes)
    folder = Path(folder)
    paths = [folder / _file_name(number, len(bins)) for number in range(len(bins))]
    index_of = {name: index for index, group in enumerate(groups) for name in group}
    last_of = {members[-1]: path for members, path in zip(bins, paths, strict=True) if members}
    dtypes = {entry.name: exporter.dtype_of(entry) for entry in exporter.entries if fmt_of(entry) is None}
    _raise(folder, _attempt(lambda: _prepare(folder, dtypes)))
    problem: str | None = None
    waiting: dict[int, dict[str, torch.Tensor]] = {}
    content: dict[str, torch.Tensor] = {}  # of the file that is being filled
    for key, full in exporter.tensors():  # on rank 0 alone there are any
        index = index_of[key]
        waiting.setdefault(index, {})[key] = full if len(groups[index]) == 1 else full.to(CPU)
        if len(waiting[index]) == len(groups[index]):
            whole = waiting.pop(index)
            if problem is None:
                problem = _attempt(partial(_add, content, form, whole, fmt_of(entries[key])))
            if problem is None and index in last_of:
                problem = _attempt(partial(_write, content, last_of[index]))
            del whole
        del full
    if problem is None and not groups:
        problem = _attempt(lambda: _write(content, paths[0]))
    if problem is None and len(bins) > 1:
        where = {
            name: path.name
            for members, path in zip(bins, paths, strict=True)
            for index in members
            for name in sizes[index]
        }
        total = sum(sum(found.values()) for found in sizes)
        problem = _attempt(lambda: _write_index(where, total, folder))
    if problem is None and formats:
        problem = _attempt(lambda: write_config(module, formats, folder))
    _raise(folder, problem)
    return paths


def _sizes(
    form: FileForm,
    entries: list[Entry],
    dtype_of: Callable[[Entry], torch.dtype],
    fmt_of: Callable[[Entry], BlockFP8 | None],
) -> dict[str, int]:
    """The tensors that a group of entries becomes in the file, and the bytes of each."""
    fmt = fmt_of(entries[0])
    group = {
        entry.name: torch.empty(entry.tensor.shape, dtype=dtype_of(entry), device="meta") for entry in entries
    }
    made = form.convert(group)
    if fmt is None:
        return {name: tensor.nbytes for name, tensor in made.items()}
    shape = entries[0].tensor.shape
    if len(entries) > 1 or [tensor.shape for tensor in made.values()] != [shape]:
        raise ValueError(
            f"save_safetensors(quantized=True): {entries[0].name} has another form in files of transformers "
            f"({', '.join(list(made)[:4])}), which its codes cannot be given"
        )
    (name,) = made
    return {name: shape.numel(), name + SCALES: 4 * fmt.grid(shape).num_scales}


def _prepare(folder: Path, dtypes: Mapping[str, torch.dtype]) -> None:
    for name, dtype in dtypes.items():
        try:
            library().torch.save({name: torch.empty(0, dtype=dtype)})
        except KeyError:
            raise ValueError(f"{name} is {dtype}, which safetensors files do not have; pass dtype") from None
    folder.mkdir(parents=True, exist_ok=True)


def _add(
    content: dict[str, torch.Tensor], form: FileForm, group: dict[str, torch.Tensor], fmt: BlockFP8 | None
) -> None:
    """Put a group's tensors into a file's content, as copies: those given are slices of a bucket."""
    for name, tensor in form.convert(group).items():
        if fmt is None:
            content[name] = tensor.to(CPU, copy=True, memory_format=torch.contiguous_format)
        else:
            content.update(quantize_whole(name, tensor, fmt))


def _write(content: dict[str, torch.Tensor], path: Path) -> None:
    """Write a file, which has its name when it is complete."""
    try:
        with atomic_write(path) as unfinished:
            library().torch.save_file(content, unfinished, metadata={"format": "pt"})
    finally:
        content.clear()


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


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _write_index(where: dict[str, str], total: int, folder: Path) -> None:
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True)
    with atomic_write(folder / INDEX) as unfinished:
        unfinished.write_text(text + "\n")


def _attempt(act: Callable[[], object]) -> str | None:
    """Do something on the writer; what went wrong, in words."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return None
    try:
        act()
    except Exception as error:  # the other ranks must not wait for this one
        return f"{type(error).__name__}: {error}"
    return None


def _raise(folder: Path, problem: str | None) -> None:
    """Raise rank 0's problem on every rank."""
    problem = gather_from_ranks(problem)[0]
    if problem is not None:
        raise OSError(f"{_CALLER}: rank 0 could not write to {folder}: {problem}")
