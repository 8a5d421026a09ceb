"""The whole model as safetensors files, named and split as Hugging Face's loaders expect them."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dbuffer.encodings import BlockFP8, RowRun
from ragged_shard.device import CPU
from ragged_shard.dist import gather_from_ranks

from .._schedule.model import member_of
from .conversions import FileGroups
from .export import Exporter
from .files import atomic_write, header_of, library, read_json
from .fp8_files import CONFIG, SCALES
from .targets import Entry

INDEX = "model.safetensors.index.json"
_FILES = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|" + re.escape(INDEX))
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
    written. Files are complete under their names or not there. Those of an earlier export into the folder are removed
    first: loaders would take its index or its single file for the new weights. One `model.safetensors` replaces another
    when it is complete.

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
    formats = _formats_of(module) if quantized else {}
    exporter = Exporter(
        module, dtype, bucket_bytes, (0,), buffers=True, caller=_CALLER, keep=lambda e: _id_of(e) in formats
    )
    files = _Files(module, exporter, formats, Path(folder), max_file_bytes)
    _raise(files.folder, _attempt(files.prepare))
    problem: str | None = None
    for name, full in exporter.tensors():  # on rank 0 alone there are any
        problem = problem or _attempt(partial(files.add, name, full))
        del full  # before the next is gathered
    problem = problem or _attempt(files.finish)
    if problem is None and formats:
        problem = _attempt(lambda: _write_config(module, formats, files.folder))
    _raise(files.folder, problem)
    return files.paths


def _id_of(entry: Entry) -> int:
    return 0 if entry.param is None else id(entry.param.sharded)


class _Files:
    """Which tensors go into which file, and on rank 0 their content until a file is complete.

    Attributes:
        paths: the files, in order.
    """

    def __init__(
        self, module: nn.Module, exporter: Exporter, formats: dict[int, BlockFP8], folder: Path, limit: int
    ) -> None:
        self.folder, self._exporter, self._formats = folder, exporter, formats
        self._entries = {entry.name: entry for entry in exporter.entries}
        self._groups = FileGroups(module, exporter.on_meta())
        self._sizes = list(map(self._sizes_of, self._groups.names, self._groups.made))
        bins = split_by_size([sum(sizes.values()) for sizes in self._sizes], limit)
        self.paths = [folder / name for name in file_names(len(bins))]
        self._bins = list(zip(self.paths, bins, strict=True))
        self._last_of = {members[-1]: path for path, members in self._bins if members}
        self._content: dict[str, torch.Tensor] = {}  # of the file that is being filled

    def _format_of(self, name: str) -> BlockFP8 | None:
        return self._formats.get(_id_of(self._entries[name]))

    def _sizes_of(self, group: list[str], made: dict[str, torch.Tensor]) -> dict[str, int]:
        """The tensors that a group of entries becomes in the file, and the bytes of each."""
        fmt = self._format_of(group[0])
        if fmt is None:
            return {name: tensor.nbytes for name, tensor in made.items()}
        shape = self._entries[group[0]].tensor.shape
        if len(group) > 1 or [tensor.shape for tensor in made.values()] != [shape]:
            raise ValueError(
                f"save_safetensors(quantized=True): {group[0]} has another form in files of transformers "
                f"({', '.join(list(made)[:4])}), which its codes cannot be given"
            )
        (name,) = made
        return {name: shape.numel(), name + SCALES: 4 * fmt.grid(shape).num_scales}

    def prepare(self) -> None:
        """Make the folder, without an earlier export. Raises ValueError for a dtype that files do not have."""
        for name, entry in self._entries.items():
            dtype = self._exporter.dtype_of(entry)
            if self._format_of(name) is None:
                header_of({name: (dtype, ())}, {})
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.folder.iterdir(), reverse=True):  # the index before what it names
            if _FILES.fullmatch(path.name) and [path] != self.paths:
                path.unlink()

    def add(self, name: str, full: torch.Tensor) -> None:
        """Put a tensor into its file's content, when its group is complete, and write the file when that is."""
        complete = self._groups.add(name, full, CPU)
        if complete is None:
            return
        (index, tensors), fmt = complete, self._format_of(name)
        for key, tensor in tensors.items():
            if fmt is None:  # a copy: these are slices of a bucket
                self._content[key] = tensor.to(CPU, copy=True, memory_format=torch.contiguous_format)
            else:
                self._content.update(_quantize_whole(key, tensor, fmt))
        if index in self._last_of:
            self._write(self._last_of[index])

    def _write(self, path: Path) -> None:
        """Write a file, which has its name when it is complete."""
        try:
            with atomic_write(path) as unfinished:
                library().torch.save_file(self._content, unfinished, metadata={"format": "pt"})
        finally:
            self._content.clear()

    def finish(self) -> None:
        """Write the index of several files; of no tensors an empty file."""
        if not self._groups.names:
            self._write(self.paths[0])
        if len(self.paths) == 1:
            return
        where = {
            name: path.name
            for path, members in self._bins
            for index in members
            for name in self._sizes[index]
        }
        write_index(self.folder, where, sum(sum(sizes.values()) for sizes in self._sizes))


def file_names(count: int) -> list[str]:
    """Names of a checkpoint's files, as Hugging Face's loaders expect them."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def write_index(folder: Path, where: Mapping[str, str], total: int) -> None:
    """Write the index of several files.

    Args:
        where: the file of each tensor.
        total: bytes of all tensors.
    """
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True)
    with atomic_write(folder / INDEX) as unfinished:
        unfinished.write_text(text + "\n")


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


# -- FP8 weights: `X` in e4m3, `X_scale_inv` in fp32, one for each tile, and the tiles' size in `config.json` ----------


def _formats_of(module: nn.Module) -> dict[int, BlockFP8]:
    """The format of each parameter of a module that is gathered in e4m3, by the id of the sharded parameter.

    Raises:
        ValueError: there is none, or tiles differ: a checkpoint has one `weight_block_size`.
    """
    formats: dict[int, BlockFP8] = {}
    for inner in module.modules():
        member = member_of(inner)
        for group in member.unit.groups if member is not None else ():
            fmt = group.wire_format
            if isinstance(fmt, BlockFP8):
                formats.update({id(param.sharded): fmt for param in group.params})
    tiles = sorted({fmt.tile for fmt in formats.values()})
    if len(tiles) != 1:
        raise ValueError(
            f"save_safetensors(quantized=True): weights with tiles {tiles} in this module; it writes those of "
            "QuantizationPolicy(weights=BlockFP8(...)), all of one tile"
        )
    return formats


def _quantize_whole(key: str, full: torch.Tensor, fmt: BlockFP8) -> list[tuple[str, torch.Tensor]]:
    """A whole weight as it is written: its codes and its scales, on the CPU. The same codes as a gather sends."""
    grid = fmt.grid(full.shape)
    codes = torch.empty(full.numel(), dtype=torch.uint8)
    scales = torch.empty(grid.num_scales)
    fmt.quantize([RowRun(grid, 0, grid.rows)], full.cpu().contiguous().view(-1), codes, scales)
    matrices = full.shape[:-2]
    return [
        (key, codes.view(torch.float8_e4m3fn).view(full.shape)),
        (key + SCALES, scales.view(*matrices, -1, grid.across)),
    ]


def _write_config(module: nn.Module, formats: dict[int, BlockFP8], folder: Path) -> None:
    """Put `quantization_config` into the folder's `config.json`, which may be there."""
    path = folder / CONFIG
    config: dict[str, Any] = read_json(path) if path.exists() else {}
    plain = [
        name
        for name, inner in module.named_modules()
        if isinstance(inner, nn.Linear) and id(inner.weight) not in formats
    ]
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(next(iter(formats.values())).tile),
        "modules_to_not_convert": plain,
    }
    with atomic_write(path) as unfinished:
        unfinished.write_text(json.dumps(config, indent=2) + "\n")
