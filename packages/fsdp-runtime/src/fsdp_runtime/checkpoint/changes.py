"""What changed since the last export: an exact comparison with a copy, block by block."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from layout_planner import TensorSpec

from .. import _torch_compat as compat
from .._torch.tree import local_tensor
from .runs import Run
from .targets import Entry

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class ChangedBlocks:
    """Blocks of one tensor that changed, from one rank; there may be several for a tensor.

    Attributes:
        name, shape: of the tensor.
        ranges: elements `(start, stop)` of the flattened tensor, ascending.
        values: theirs, one after the other, 1-D.
    """

    name: str
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    values: torch.Tensor

    def apply_to(self, tensor: torch.Tensor) -> None:
        """Write the values into a contiguous tensor of this shape, cast to its dtype; in place.

        Raises:
            ValueError: another shape, or not contiguous.
        """
        if tuple(tensor.shape) != self.shape or not tensor.is_contiguous():
            raise ValueError(
                f"{self.name}: blocks of a tensor of shape {self.shape} for one of shape {tuple(tensor.shape)}"
                f"{'' if tensor.is_contiguous() else ', which is not contiguous'}"
            )
        flat, at = tensor.detach().view(-1), 0
        for start, stop in self.ranges:
            flat[start:stop].copy_(self.values[at : at + stop - start])
            at += stop - start


@dataclass(frozen=True)
class ChangedElements:
    """Elements of one tensor that changed.

    Attributes:
        name, shape: of the tensor.
        indices: positions in the flattened tensor, ascending, int64.
        values: theirs, 1-D.
    """

    name: str
    shape: tuple[int, ...]
    indices: torch.Tensor
    values: torch.Tensor


class ExportedParams:
    """What `iter_full_params(changed_since=...)` exported last: a copy of this rank's shards in the exported dtype.

    Make one, pass it to every export; the first exports everything. It is valid only where an export has run to its
    end on all ranks: after one that was broken off, or to other receivers, everything is exported again.

    Args:
        device: where the copy is, such as "cpu". Defaults to where the shards are.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = None if device is None else torch.device(device)
        self._copies: dict[Any, torch.Tensor] = {}
        #: Whether the last export ran to its end on this rank, and the ranks that received it.
        self.complete = False
        self.receivers: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Memory that the copy takes."""
        return sum(copy.nbytes for copy in self._copies.values())

    def begin(self, *, valid: bool) -> None:
        """An export begins; where the copies are not valid they are dropped, so that everything has changed."""
        self.complete = False
        if not valid:
            self._copies.clear()

    def end(self, receivers: tuple[int, ...] | None) -> None:
        """An export to these ranks, or to all, has run to its end."""
        self.complete, self.receivers = True, receivers

    def swap(self, key: Any, now: torch.Tensor) -> torch.Tensor | None:
        """Keep a copy of these values; which of them differ from the last ones (bool, 1-D). None: there were none."""
        device = now.device if self._device is None else self._device
        last, bits = self._copies.get(key), now.reshape(-1).view(_BITS[now.dtype.itemsize])
        if last is None or last.dtype != now.dtype or last.numel() != now.numel():
            kept = torch.empty(now.numel(), dtype=now.dtype, device=device)
            self._copies[key] = kept.copy_(now.reshape(-1))
            return None
        changed = bits != last.to(now.device).view(bits.dtype)
        last.copy_(now.reshape(-1))
        return changed


def changed_ranges(
    run: Run, values: torch.Tensor, low: int, exported: ExportedParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements `(start, stop)` of the segment, of this rank's piece, in blocks that changed, ascending, merged; values.

    Args:
        values: this rank's piece in the exported dtype.
        low: where in the segment it begins.
    """
    ranges: list[tuple[int, int]] = []
    for entry, first, differs in _compared(run, values, low, exported):
        offset, spec = entry.place.offset, run.group.plan.layout.spec(entry.place.name)
        ranges += [(start + offset, stop + offset) for start, stop in _blocks(spec, first - offset, differs)]
    parts = [values[start - low : stop - low] for start, stop in ranges]
    places = torch.tensor(ranges, dtype=torch.int64, device=values.device).view(-1)
    return places, torch.cat(parts) if parts else values[:0]


def changed_elements(
    run: Run, values: torch.Tensor, low: int, exported: ExportedParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions in the segment of this rank's elements that changed, ascending; values. See `changed_ranges`."""
    nothing = torch.empty(0, dtype=torch.int64, device=values.device)
    compared = _compared(run, values, low, exported)
    places = torch.cat(
        [nothing, *(torch.nonzero(differs).view(-1) + first for _, first, differs in compared)]
    )
    return places, values[places - low]


def _compared(
    run: Run, values: torch.Tensor, low: int, exported: ExportedParams
) -> Iterator[tuple[Entry, int, torch.Tensor]]:
    """Where in the segment this rank's part of each entry begins, and which elements differ from the last export."""
    for entry in run.members:
        offset = entry.place.offset
        first, last = max(low, offset), min(low + values.numel(), offset + entry.place.numel)
        if first >= last:
            continue
        part = values[first - low : last - low]
        # By its place: where the layout is another one since, the copy is of other elements.
        differs = exported.swap((entry.name, first - offset), part)
        yield entry, first, torch.ones_like(part, dtype=torch.bool) if differs is None else differs


def _blocks(spec: TensorSpec, first: int, differs: torch.Tensor) -> list[tuple[int, int]]:
    """The blocks of a tensor in which an element differs, as ranges of its elements; neighbors merged."""
    grid, stop = spec.grid, first + differs.numel()
    if not bool(differs.any()):
        return []
    at = torch.nonzero(differs).view(-1) + first
    starts = at // grid.period * grid.period + at % grid.period // grid.block * grid.block
    starts = torch.unique_consecutive(starts)
    ends = torch.minimum(starts + grid.block, (starts // grid.period + 1) * grid.period)
    gaps = torch.nonzero(starts[1:] != ends[:-1]).view(-1)
    begins = torch.cat([starts[:1], starts[1:][gaps]]).clamp(min=first)
    stops = torch.cat([ends[:-1][gaps], ends[-1:]]).clamp(max=stop)
    return list(zip(begins.tolist(), stops.tolist(), strict=True))


def has_changed(entry: Entry, dtype: torch.dtype, exported: ExportedParams) -> bool:
    """Whether this rank's slice of a tensor that is exported as a whole differs from the last. Subclasses always do."""
    group = entry.separate
    local = local_tensor(entry.tensor) if group is None else group.local_values(entry.tensor)
    if compat.is_wrapper_subclass(local):
        return True
    differs = exported.swap(entry.name, local.detach().to(dtype).contiguous())
    return differs is None or bool(differs.any())
