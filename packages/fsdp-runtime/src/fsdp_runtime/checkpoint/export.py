"""`iter_full_params`: a model's whole tensors one run of memory after the other, for files and inference engines."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ragged_shard.dist import DISTRIBUTED, on_all_ranks

from .._torch.tree import cast_to, local_tensor
from .merged import Adapter, Merged
from .runs import Run, gather, receivers_of, runs_of_entries, tensors_of
from .targets import Target, entries_of_model

_CALLER = "iter_full_params"


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
    ranks. At first one all-gather of small objects compares the arguments.

    Memory for it is at most `bucket_bytes` at any time, as long as the caller holds nothing but the last tensor; or
    twice the largest tensor if it is larger (with `ranks` three times). Tensors are the caller's; tensors of one run
    share memory. Of tied parameters the first name comes. The parameters must not change meanwhile.

    Args:
        model: in which no forward or backward is under way; or `merged_params` of it.
        dtype: of floating-point tensors. Defaults to the dtypes of the shards.
        bucket_bytes: of gathered memory.
        ranks: global ranks that receive; the others iterate over nothing, but take part. Defaults to all.

    Raises:
        ValueError: a parameter on meta, no positive `bucket_bytes`, unknown ranks, or arguments that differ between
            ranks; on every rank.
    """
    return Exporter(model, dtype, bucket_bytes, ranks, buffers=False).tensors()


def entries_of(model: nn.Module | Merged, *, buffers: bool) -> list[Target]:
    """The tensors to export; see `entries_of_model`."""
    if isinstance(model, Merged):
        return model.entries(buffers=buffers)
    return entries_of_model(model, buffers=buffers)


def on_meta(entries: Iterable[Target], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Entries as they are exported in a dtype, plain and on meta, by name and in their order."""
    kept = {e.name: torch.empty(e.tensor.shape, dtype=e.tensor.dtype, device="meta") for e in entries}
    return {name: cast_to(dtype)(tensor) for name, tensor in kept.items()}


class Exporter:
    """A plan of gathers, equal on all ranks.

    Args:
        buffers: persistent buffers too.

    Attributes:
        entries: in the order in which they come.
        adapters: what is merged into them, by name.
    """

    def __init__(
        self,
        model: nn.Module | Merged,
        dtype: torch.dtype | None,
        bucket_bytes: int,
        ranks: Collection[int] | None,
        *,
        buffers: bool,
        caller: str = _CALLER,
    ) -> None:
        self._ranks = None if ranks is None else tuple(sorted(ranks))
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._receives = ranks is None or rank in ranks
        self._dtype = dtype
        self.adapters: dict[str, list[Adapter]] = model.adapters if isinstance(model, Merged) else {}
        with on_all_ranks(caller) as options:
            options.update(dtype=dtype, bucket_bytes=bucket_bytes, ranks=self._ranks)
            _check(bucket_bytes, self._ranks)
            self.entries = entries_of(model, buffers=buffers)
        grouped = [entry for entry in self.entries if entry.param is not None]
        self._single = [entry for entry in self.entries if entry.param is None]
        dtypes = [e.tensor.dtype if e.name in self.adapters else self.dtype_of(e) for e in grouped]
        # The caller still holds the last run when the next is gathered; and a slice may be cast to be sent.
        self._runs = runs_of_entries(grouped, dtypes, bucket_bytes // (2 if ranks is None else 3))

    def dtype_of(self, entry: Target) -> torch.dtype:
        """In which a tensor is exported."""
        tensor = entry.tensor
        if self._dtype is None or not tensor.is_floating_point():
            return tensor.dtype
        return self._dtype

    def sources(self, entry: Target) -> list[torch.Tensor]:
        """This rank's tensors that an entry is made of."""
        adapters = self.adapters.get(entry.name, ())
        factors = [slots[attribute] for adapter in adapters for slots, attribute in adapter.factors]
        return [local_tensor(tensor) for tensor in (entry.tensor, *factors)]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All of them, whole."""
        for run in self._runs:
            yield from self._whole_run(run)
        for entry in self._single:
            yield from self._whole_entry(entry)

    def _whole_run(self, run: Run) -> Iterator[tuple[str, torch.Tensor]]:
        with torch.no_grad():
            full = gather(run, receivers_of(run, self._ranks))
        tensors = None if full is None else tensors_of(run, full)
        del full
        for entry in run.members:
            with torch.no_grad():
                tensor = None if tensors is None else next(tensors)
                if entry.name in self.adapters:
                    tensor = self._merged(entry, tensor)
            if tensor is not None and self._receives:
                yield entry.name, tensor
            del tensor

    def _whole_entry(self, entry: Target) -> Iterator[tuple[str, torch.Tensor]]:
        tensor: Any = entry.tensor
        with torch.no_grad():
            own = True  # whether the whole tensor is the model's own memory
            if isinstance(tensor, DISTRIBUTED):
                own = all(placement.is_replicate() for placement in tensor.placements)
                tensor = tensor.full_tensor()
            if entry.name in self.adapters:
                tensor, own = self._merged(entry, tensor.clone() if own else tensor), False
            if self._receives:
                tensor = tensor.to(self.dtype_of(entry), copy=own)
        if self._receives:
            yield entry.name, tensor

    def _merged(self, entry: Target, whole: torch.Tensor | None) -> torch.Tensor | None:
        """A weight with its adapters, on ranks that have it; the others send their part of the factors."""
        for adapter in self.adapters[entry.name]:
            factors = adapter.whole_factors()
            whole = adapter.merge(whole, factors) if whole is not None and self._receives else whole
        return None if whole is None else whole.to(self.dtype_of(entry))


def _check(bucket_bytes: int, ranks: Sequence[int] | None) -> None:
    if type(bucket_bytes) is not int or bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes!r}; expected a number of bytes from 1")
    size = dist.get_world_size() if dist.is_initialized() else 1
    if ranks is not None and (not ranks or any(not 0 <= rank < size for rank in ranks)):
        raise ValueError(f"ranks is {ranks}; expected some of the global ranks 0 to {size - 1}")
