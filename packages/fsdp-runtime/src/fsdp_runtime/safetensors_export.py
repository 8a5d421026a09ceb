"""The whole model as safetensors files, named and split as Hugging Face's loaders expect them."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
from torch import nn

from dbuffer import BlockFP8
from ragged_shard import CPU

from .safetensors_fp8 import SCALES, formats_of, quantize_whole, write_config
from .weights.agreement import agree
from .weights.conversions import FileForm
from .weights.entries import Entry
from .weights.export import Exporter
from .weights.files import CODE_OF

INDEX = "model.safetensors.index.json"
_CALLER = "save_safetensors"


@dataclass(frozen=True)
class _Planned:
    """A tensor as it will be in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """In the file."""
        return math.prod(self.shape) * self.dtype.itemsize


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

    Tensors come as those of `iter_full_params`, to rank 0 alone, which writes each as it comes: memory for it is at
    most `bucket_bytes` on any rank, and one tensor on rank 0's CPU. One file is `model.safetensors`; several are
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
        OSError: rank 0 could not write; on every rank, naming the folder.
        ValueError: `quantized`, and no weight is gathered in e4m3, or tiles differ; or a dtype without a name in files.
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
    contents = [
        _planned(form, [entries[name] for name in group], exporter.dtype_of, fmt_of) for group in groups
    ]
    bins = _split([sum(one.nbytes for one in content) for content in contents], max_file_bytes)
    folder = Path(folder)
    names = [_file_name(number, len(bins)) for number in range(len(bins))]
    files = [
        _File(folder / name, [one for index in members for one in contents[index]])
        for name, members in zip(names, bins, strict=True)
    ]
    problem = _attempt(lambda: folder.mkdir(parents=True, exist_ok=True))
    file_of = {index: files[number] for number, members in enumerate(bins) for index in members}
    index_of = {name: index for index, group in enumerate(groups) for name in group}
    waiting: dict[int, dict[str, torch.Tensor]] = {}
    for key, full in exporter.tensors():  # on rank 0 alone there are any
        index = index_of[key]
        waiting.setdefault(index, {})[key] = full if len(groups[index]) == 1 else full.to(CPU)
        if len(waiting[index]) == len(groups[index]):
            whole = waiting.pop(index)
            if problem is None:
                problem = _attempt(partial(file_of[index].append, form, whole, fmt_of(entries[key])))
            del whole
        del full
    if problem is None and not contents:
        problem = _attempt(files[0].finish)
    if problem is None and len(bins) > 1:
        where = {one.name: file.path.name for file in files for one in file.content}
        total = sum(one.nbytes for content in contents for one in content)
        problem = _attempt(lambda: _write_index(where, total, folder))
    if problem is None and formats:
        problem = _attempt(lambda: write_config(module, formats, folder))
    for file in files:
        file.discard()
    problem = agree(_CALLER, None, problem)[0]
    if problem is not None:
        raise OSError(f"save_safetensors: rank 0 could not write to {folder}: {problem}")
    return [file.path for file in files]


def _planned(
    form: FileForm,
    entries: list[Entry],
    dtype_of: Callable[[Entry], torch.dtype],
    fmt_of: Callable[[Entry], BlockFP8 | None],
) -> list[_Planned]:
    """The tensors that a group of entries becomes in the file."""
    for entry in entries:
        if fmt_of(entry) is None and dtype_of(entry) not in CODE_OF:
            raise ValueError(
                f"{entry.name} is {dtype_of(entry)}, which safetensors files do not have; pass dtype"
            )
    fmt = fmt_of(entries[0])
    group = {
        entry.name: torch.empty(entry.tensor.shape, dtype=dtype_of(entry), device="meta") for entry in entries
    }
    made = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in form.convert(group).items()}
    if fmt is None:
        return [_Planned(name, dtype, shape) for name, (dtype, shape) in made.items()]
    shape = tuple(entries[0].tensor.shape)
    if len(entries) > 1 or [found for _, found in made.values()] != [shape]:
        raise ValueError(
            f"save_safetensors(quantized=True): {entries[0].name} has another form in files of transformers "
            f"({', '.join(list(made)[:4])}), which its codes cannot be given"
        )
    (name,) = made
    scales = (*shape[:-2], -1, fmt.grid(shape).across)
    rows = fmt.grid(shape).num_scales // math.prod(shape[:-2]) // scales[-1]
    return [
        _Planned(name, torch.float8_e4m3fn, shape),
        _Planned(name + SCALES, torch.float32, (*shape[:-2], rows, scales[-1])),
    ]


def _as_written(form: FileForm, group: dict[str, torch.Tensor], fmt: BlockFP8 | None) -> list[torch.Tensor]:
    if fmt is None:
        return [tensor.to(CPU).contiguous() for tensor in form.convert(group).values()]
    ((key, full),) = group.items()
    return [tensor for _, tensor in quantize_whole(key, full, fmt)]


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


class _File:
    """A safetensors file that is written tensor by tensor, and has its name when it is complete.

    Attributes:
        path: where it will be.
        content: its tensors, in order.
    """

    def __init__(self, path: Path, content: list[_Planned]) -> None:
        self.path, self.content = path, content
        self._waiting = len(content)
        self._unfinished = path.with_suffix(".unfinished")
        self._file: BinaryIO | None = None

    def append(self, form: FileForm, group: dict[str, torch.Tensor], fmt: BlockFP8 | None) -> None:
        """Write the next group's tensors; after the last one the file is there."""
        if self._file is None:
            self._file = self._unfinished.open("wb")
            self._file.write(self._header())
        for tensor in _as_written(form, group, fmt):
            self._file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            self._waiting -= 1
        if self._waiting == 0:
            self.finish()

    def finish(self) -> None:
        """Give the file its name."""
        if self._file is None:  # nothing is in it
            self._unfinished.write_bytes(self._header())
        else:
            self._file.close()
        os.replace(self._unfinished, self.path)

    def _header(self) -> bytes:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for one in self.content:
            header[one.name] = {
                "dtype": CODE_OF[one.dtype],
                "shape": one.shape,
                "data_offsets": (end, end + one.nbytes),
            }
            end += one.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # so that data are aligned
        return len(text).to_bytes(8, "little") + text

    def discard(self) -> None:
        """Remove what was not completed."""
        if self._file is not None:
            self._file.close()
            self._unfinished.unlink(missing_ok=True)


def _write_index(where: dict[str, str], total: int, folder: Path) -> None:
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True)
    unfinished = folder / f"{INDEX}.unfinished"
    unfinished.write_text(text + "\n")
    os.replace(unfinished, folder / INDEX)


def _attempt(act: Callable[[], object]) -> str | None:
    """Do something on the writer; what went wrong, in words."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return None
    try:
        act()
    except Exception as error:  # whatever it is, the other ranks must hear of it, not wait
        return f"{type(error).__name__}: {error}"
    return None
