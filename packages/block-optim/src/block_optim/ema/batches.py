"""Calls that move averages towards weights: one lerp over each run of neighbors, in chunks where dtypes differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from block_optim.core import _torch_compat as compat
from block_optim.core.params import Param
from block_optim.core.rounding import Rounder
from block_optim.core.runs import joint_runs
from block_optim.core.scratch import Scratch, chunk_on, packed


@dataclass(frozen=True)
class _Slice:
    """A stretch of memory, 1-D; of one parameter and its first element in the global tensor if it is rounded."""

    average: torch.Tensor
    weight: torch.Tensor
    name: str
    first: int

    def cut(self, limit: int) -> "list[_Slice]":
        """Slices of at most ``limit`` elements."""
        starts = range(0, self.average.numel(), limit)
        pairs = zip(starts, self.average.split(limit), self.weight.split(limit), strict=True)
        return [_Slice(average, weight, self.name, self.first + start) for start, average, weight in pairs]


class Batch:
    """Slices of one device and one pair of dtypes that are moved by one call."""

    def __init__(self, slices: list[_Slice], scratch: Scratch, rounder: Rounder | None) -> None:
        self._rounder, self._places = rounder, [(s.name, s.first) for s in slices]
        self._averages, self._weights = [s.average for s in slices], [s.weight for s in slices]
        self._wide_averages = self._wide("averages", self._averages, scratch)
        self._wide_weights = self._wide("weights", self._weights, scratch)
        if rounder is not None:  # their copies follow each other there
            self._flat = scratch.take("averages", (sum(a.numel() for a in self._averages),), torch.float32)

    def _wide(self, role: str, tensors: list[torch.Tensor], scratch: Scratch) -> list[torch.Tensor]:
        """The tensors, or scratch for them in the dtype that is computed in."""
        dtype = torch.promote_types(self._averages[0].dtype, torch.float32)
        return tensors if tensors[0].dtype == dtype else scratch.take_like(role, tensors, dtype)

    def __call__(self, weight: float, seed: int, step: int) -> None:
        """Move averages by a share of their distance to the weights."""
        for wide, narrow in (
            (self._wide_averages, self._averages),
            (self._wide_weights, self._weights),
        ):
            if wide is not narrow:
                compat.foreach_copy_(wide, narrow)
        compat.foreach_lerp_(self._wide_averages, self._wide_weights, weight)
        if self._rounder is not None:
            self._rounder.each(self._flat, self._averages, seed, step, self._places)


def batches_of(params: Sequence[Param], averages: Sequence[torch.Tensor]) -> list[Batch]:
    """The calls for some parameters and this rank's averages of them; good for as long as all stay where they are."""
    weights = [p.local for p in params]
    keys = [i if _is_rounded(average) else 0 for i, average in enumerate(averages)]
    kinds: dict[Any, list[_Slice]] = {}
    for run in joint_runs([weights, averages], keys):
        average, weight, param = run.view(averages), run.view(weights), params[run.members[0]]
        kind = weight.device, weight.dtype, average.dtype
        kinds.setdefault(kind, []).append(_Slice(average, weight, param.name, param.start or 0))
    return [batch for slices in kinds.values() for batch in _batches_of_kind(slices)]


def _is_rounded(average: torch.Tensor) -> bool:
    return average.dtype.itemsize < 4


def _batches_of_kind(slices: list[_Slice]) -> list[Batch]:
    """The calls for slices of one device and one pair of dtypes."""
    average, total = slices[0].average, sum(s.average.numel() for s in slices)
    in_place = average.dtype == slices[0].weight.dtype and not _is_rounded(average)
    limit = total if in_place else min(total, chunk_on(average.device))
    rounder = Rounder(limit, average.device) if _is_rounded(average) else None
    limit = limit if rounder is None else rounder.numel
    scratch = Scratch(average.device, limit)
    parts = (part for s in slices for part in s.cut(limit))
    chunks = packed(parts, lambda part: part.average.numel(), limit)
    return [Batch(chunk, scratch, rounder) for chunk in chunks]


def trade(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange the contents of two tensors of the same shape, strides and dtype, without memory for a whole one."""
    limit = chunk_on(first.device)
    flat = (t.as_strided((t.numel(),), (1,)).split(limit) for t in (first, second))
    for a, b in zip(*flat, strict=True):
        spare = a.clone()
        a.copy_(b)
        b.copy_(spare)
