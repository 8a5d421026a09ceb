"""`iter_full_params`, `save_safetensors`: a model's whole tensors run by run of memory, also into files."""

import os
from collections.abc import Collection, Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ragged_shard.device import CPU
from ragged_shard.dist import DISTRIBUTED, gather_from_ranks, on_all_ranks

from .._torch.tree import cast_to, local_tensor
from .conversions import FileGroups
from .files import split_into_files, write_files
from .merged import Adapter, Merged
from .runs import gather, runs_of, tensors_of
from .targets import Target, entries_of_model

Model = nn.Module | Merged
Dtype = torch.dtype | None  # None: as they are
Ranks = Collection[int] | None  # None: all


def iter_full_params(
    model: nn.Module | Merged,
    *,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = 1 << 30,
    ranks: Collection[int] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of a model, sharded or not, as `(name, whole plain tensor)`; every rank iterates to the end.

    All ranks go in step, unit by unit in the order of memory, each in runs of tensors that follow one another: one
    all-gather where a run is all of a segment, else one broadcast from each rank that holds some of it; with `ranks`
    one all-to-all for each of them. Each receiver is sent the bytes that it lacks, in `dtype`, once. Tensors that
    another parallelism cuts are then gathered over its mesh; codes, tensor subclasses and DTensors one at a time on all
    ranks. All-reduces of 64 bytes compare the arguments, and before each run find a rank without memory for it.

    Takes at most `bucket_bytes`, as long as the caller holds nothing but the last tensor; or twice the largest tensor
    if it is larger (with `ranks` three times). Tensors are the caller's; those of one run share memory. Of tied
    parameters the first name comes. The parameters must not change meanwhile.

    Args:
        model: in which no forward or backward is under way; or `merged_params` of it.
        dtype: of floating-point tensors. Defaults to the dtypes of the shards.
        bucket_bytes: of gathered memory.
        ranks: global ranks that receive; the others iterate over nothing, but take part. Defaults to all.

    Raises:
        ValueError: a parameter on meta, no positive `bucket_bytes`, unknown ranks, or arguments that differ between
            ranks; on every rank.
    """
    return Exporter("iter_full_params", model, dtype, bucket_bytes, ranks, buffers=False).tensors()


def save_safetensors(
    module: nn.Module | Merged,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5_000_000_000,
    bucket_bytes: int = 1 << 30,
) -> list[Path]:
    """Write the full parameters and buffers of a module, sharded or not; every rank calls it. Returns the files.

    Tensors are gathered as in `iter_full_params`, on rank 0 alone, which writes them one by one. One file is
    `model.safetensors`; several are `model-00001-of-0000N.safetensors` with `model.safetensors.index.json`. Of tied
    parameters the first name is written. Files are complete under their names or not there. Files of an earlier export
    into the folder, which loaders could take for the new weights, are removed first; one `model.safetensors` replaces
    another when it is complete.

    Args:
        module: with the names that the files should have; of a transformers model the files have the names and forms
            that its `save_pretrained` writes, and tensors that it converts together are on rank 0's CPU together. Or
            `merged_params` of it.
        folder: made where it is missing.
        dtype: of floating-point tensors in the files. Defaults to theirs.
        max_file_bytes: of one file; a larger tensor has a file to itself.
        bucket_bytes: of gathered memory on any rank; see `iter_full_params`.

    Raises:
        OSError: rank 0 could not write: the folder, the disk, a dtype that files do not have, safetensors not
            installed; on every rank, naming the folder.
    """
    folder, problem = Path(folder), ""
    exporter = Exporter("save_safetensors", module, dtype, bucket_bytes, (0,), buffers=True)
    groups = file_groups(module, exporter.entries, dtype)
    files = split_into_files(folder, groups.made, max_file_bytes)
    tensors = exporter.tensors()
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            # `map` keeps no tensor while the next is gathered
            write_files(folder, files, map(itemgetter(1), groups.in_file_form(tensors, CPU)))
        except Exception as error:  # the other ranks must not wait for this one
            exporter.problem, problem = error, f"{type(error).__name__}: {error}"
    try:
        for _ in tensors:  # to the end on every rank, or to the next gather where rank 0 has a problem
            pass
    except Exception as error:  # of gathers, on every rank
        problem = problem or f"{type(error).__name__}: {error}"
    problem = gather_from_ranks(problem)[0]
    if problem:
        raise OSError(f"save_safetensors: rank 0 could not write to {folder}: {problem}")
    return list(files)


def entries_of(model: Model, *, buffers: bool) -> list[Target]:
    """The tensors to export; see `entries_of_model`."""
    if isinstance(model, Merged):
        return model.entries(buffers=buffers)
    return entries_of_model(model, buffers=buffers)


def file_groups(model: Model, entries: Iterable[Target], dtype: Dtype) -> FileGroups:
    """Entries, exported in a dtype and in their order, in the form of files."""
    kept = {e.name: torch.empty(e.tensor.shape, dtype=e.tensor.dtype, device="meta") for e in entries}
    exported = {name: cast_to(dtype)(tensor) for name, tensor in kept.items()}
    return FileGroups(model.base if isinstance(model, Merged) else model, exported)


class Exporter:
    """A plan of gathers, equal on all ranks; with `buffers` also of persistent ones. Raises as `iter_full_params`."""

    def __init__(
        self, caller: str, model: Model, dtype: Dtype, bucket_bytes: int, ranks: Ranks, *, buffers: bool
    ) -> None:
        self._ranks = None if ranks is None else tuple(sorted(ranks))
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._receives = ranks is None or rank in ranks
        self._dtype = dtype
        # of the consumer of this rank's tensors: all ranks raise it in the next gather
        self.problem: Exception | None = None
        # what is merged into them, by name
        self.adapters: dict[str, list[Adapter]] = model.adapters if isinstance(model, Merged) else {}
        with on_all_ranks(caller) as options:
            options.update(dtype=dtype, bucket_bytes=bucket_bytes, ranks=self._ranks)
            if type(bucket_bytes) is not int or bucket_bytes < 1:
                raise ValueError(f"bucket_bytes is {bucket_bytes!r}; expected a number of bytes from 1")
            size = dist.get_world_size() if dist.is_initialized() else 1
            if self._ranks is not None and not (self._ranks and set(self._ranks) <= set(range(size))):
                raise ValueError(f"ranks is {self._ranks}; expected some of the global ranks 0 to {size - 1}")
            self.entries = entries_of(model, buffers=buffers)  # in the order in which they come
        self._by_param = {entry.param: entry for entry in self.entries if entry.param is not None}
        dtypes = ((param, self._gathered_in(entry)) for param, entry in self._by_param.items())
        # The caller still holds the last run when the next is gathered; and a slice may be cast to be sent.
        self._runs = list(runs_of(dtypes, bucket_bytes // (2 if ranks is None else 3)))

    def _gathered_in(self, entry: Target) -> torch.dtype:
        """The dtype in which a tensor is gathered: adapters are merged before it is cast."""
        cast = entry.name not in self.adapters and entry.tensor.is_floating_point()
        return self._dtype if self._dtype is not None and cast else entry.tensor.dtype

    def sources(self, entry: Target) -> list[torch.Tensor]:
        """This rank's tensors that an entry is made of."""
        adapters = self.adapters.get(entry.name, ())
        factors = [slots[attribute] for adapter in adapters for slots, attribute in adapter.places[1:]]
        return [local_tensor(tensor) for tensor in (entry.tensor, *factors)]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All of them, whole."""
        for run in self._runs:
            with torch.no_grad():
                full = gather(run, self._ranks, self.problem)
            tensors = iter(()) if full is None else tensors_of(run, full)
            del full
            for param in run.members:
                yield from self._exported(self._by_param[param], tensors)
            del tensors  # and with them their memory, before the next run is gathered
        for entry in self.entries:
            if entry.param is None:
                yield from self._exported(entry, map(self._whole, [entry]))  # `map` keeps no tensor

    def _whole(self, entry: Target) -> torch.Tensor:
        tensor: Any = entry.tensor
        own = True  # whether the whole tensor is the model's own memory
        if isinstance(tensor, DISTRIBUTED):
            own = all(placement.is_replicate() for placement in tensor.placements)
            tensor = tensor.full_tensor()
        whole: torch.Tensor = tensor.to(self._gathered_in(entry), copy=own) if self._receives else tensor
        return whole

    def _exported(self, entry: Target, tensors: Iterator[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The next tensor with its adapters, on ranks that receive; the others send their part of it."""
        with torch.no_grad():
            tensor = next(tensors, None)
            if not self._receives:
                tensor = None
            for adapter in self.adapters.get(entry.name, ()):
                factors = adapter.whole_factors()
                tensor = None if tensor is None else adapter.merge(tensor, factors)
            tensor = None if tensor is None else cast_to(self._dtype)(tensor)
        if tensor is not None:
            yield entry.name, tensor
