"""Positions of a layout's tensors in this rank's slices: arithmetic only, no memory.

segment buffer   |   rank 0   |   rank 1   |   rank 2   |
tensor t             [offset ... offset + numel]
rank 1's slice                [begin, begin + local_numel], counted from the slice's start
"""

import math
import operator
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch

from layout_planner import Layout, TensorSpec
from ragged_shard import RaggedShard

ALIGNMENT = 16  # bytes; NCCL copies element by element if a rank's slice is not aligned to it


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """One tensor of a group and one rank's slice of it. All counts are in elements.

    Attributes:
        name, shape: name and shape of the tensor.
        segment: index of its segment.
        offset, numel: its position in the segment's gathered memory.
        begin, local_numel: position of the slice in this rank's shard; `begin` is inside the shard also for an empty
            slice.
        first: the slice's first element, counted in the tensor.
        local_shape, local_stride: shape and stride of the slice: the flattened prefix, then the dimensions never cut.
        num_cut_dims: how many leading dimensions are flattened.
    """

    name: str
    shape: tuple[int, ...]
    segment: int
    offset: int
    numel: int
    begin: int
    first: int
    local_numel: int
    local_shape: tuple[int, ...]
    local_stride: tuple[int, ...]
    num_cut_dims: int


@dataclass(frozen=True)
class Geometry:
    """Positions of a layout's tensors on one rank. Communicates nothing.

    Args:
        layout: planned for as many ranks as the shard axis has.
        rank: this rank on that axis.
    """

    layout: Layout
    rank: int

    @cached_property
    def slices(self) -> Mapping[str, TensorSlice]:
        """Every tensor's slice by name, in the order of the group."""
        places = {}
        for index, segment in enumerate(self.layout.segments):
            for name, offset in zip(segment.names, segment.offsets, strict=True):
                places[name] = (index, offset, segment.shard_size)
        slices = {spec.name: self._slice(spec, *places[spec.name]) for spec in self.layout.tensors}
        return MappingProxyType(slices)

    def _slice(self, spec: TensorSpec, segment: int, offset: int, shard_size: int) -> TensorSlice:
        name, shape, numel, low = spec.name, spec.shape, spec.numel, self.rank * shard_size
        num_cut = len(self.layout.local_dims(name))
        begin, end = min(max(offset, low), low + shard_size), min(max(offset + numel, low), low + shard_size)
        rest = shape[num_cut:]
        local_shape = ((end - begin) // math.prod(rest), *rest)
        stride = [1]
        for size in rest[::-1]:
            stride.append(stride[-1] * max(size, 1))
        first = min(max(low - offset, 0), numel)
        return TensorSlice(
            name, shape, segment, offset, numel, begin - low, first, end - begin, local_shape,
            tuple(stride[::-1]), num_cut,
        )  # fmt: skip

    @cached_property
    def gaps(self) -> tuple[tuple[int, int, int], ...]:
        """The runs `(segment, begin, length)` of this rank's shard that hold padding."""
        gaps = []
        for index, segment in enumerate(self.layout.segments):
            end = 0
            filled = sorted(
                [
                    (s.begin, s.local_numel)
                    for s in self.slices.values()
                    if s.segment == index and s.local_numel
                ]
            )
            for begin, length in [*filled, (segment.shard_size, 0)]:
                if begin > end:
                    gaps.append((index, end, begin - end))
                end = begin + length
        return tuple(gaps)

    def gaps_in(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Views of the padding in this rank's slices `flats`, one tensor a segment."""
        return [flats[segment].narrow(0, begin, length) for segment, begin, length in self.gaps]

    @cached_property
    def placements(self) -> Mapping[str, RaggedShard]:
        """Placement of every tensor on the shard axis."""
        placements = {}
        for name, part in self.slices.items():
            placements[name] = RaggedShard(tuple(range(part.num_cut_dims)), self.layout.local_units(name))
        return MappingProxyType(placements)

    def cut(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """This rank's slice of a whole tensor, in its local shape; a view if the tensor is contiguous."""
        part = self.slices[name]
        return value.reshape(-1).narrow(0, part.first, part.local_numel).view(part.local_shape)


# Keyed by the layout's id; the value keeps the layout alive. Buffers of one group share a geometry.
_known: "weakref.WeakValueDictionary[tuple[int, int], Geometry]" = weakref.WeakValueDictionary()


def geometry_of(layout: Layout, rank: int) -> Geometry:
    """The geometry of a layout on a rank, cached while it is in use."""
    geometry = _known.get((id(layout), rank))
    if geometry is None:
        geometry = _known[id(layout), rank] = Geometry(layout, rank)
    return geometry


def alignment_problem(layout: Layout, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """An error message for the first slice or tensor that is not on a 16-byte boundary, or None."""
    narrowest = min(dtypes, key=operator.attrgetter("itemsize"))
    itemsize = narrowest.itemsize
    advice = f"in {narrowest}; plan with align={ALIGNMENT // math.gcd(ALIGNMENT, itemsize)}"
    for index, segment in enumerate(layout.segments):
        for name, offset in zip(segment.names, segment.offsets, strict=True):
            if offset * itemsize % ALIGNMENT:
                return f"{name} starts at byte {offset * itemsize}, not a multiple of {ALIGNMENT}, {advice}"
        if segment.shard_size * itemsize % ALIGNMENT:
            return (
                f"segment {index} ({segment.names[0]}, ...): a rank's slice has {segment.shard_size * itemsize} bytes, "
                f"not a multiple of {ALIGNMENT}, {advice}"
            )
    return None


def first_difference(local: Layout, other: Layout) -> str | None:
    """Describes the first difference of two layouts, by tensor or segment; None if they are equal."""
    here, there = _facts(local), _facts(other)
    for _, what in here.keys() ^ there.keys():
        return f"{what} is only {'here' if (1, what) in here else 'there'}"
    for key in here:
        if here[key] != there[key]:
            return f"{key[1]} is {here[key]} here, {there[key]} there"
    return None


def _facts(layout: Layout) -> dict[tuple[int, str], str]:
    """All that makes a layout, by its name after a number: the most telling first."""
    facts = {(0, "world_size"): str(layout.world_size), (0, "align"): str(layout.align)}
    names = [spec.name for spec in layout.tensors]
    facts |= {(1, f"tensor {s.name}"): f"{tuple(s.shape)} in blocks {s.block}" for s in layout.tensors}
    for name in names:
        facts[2, f"tensor {name}"] = f"at element {layout.offset(name)} of segment {layout.segment_of(name)}"
    facts[3, "the number of elements of a rank by segment"] = str([s.shard_size for s in layout.segments])
    return facts | {(4, "the order of tensors"): str(names)}
