"""Where every tensor of a layout lies in this rank's slices: arithmetic only, no memory.

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

ALIGNMENT = 16  # bytes; NCCL copies element by element where a rank's slice starts anywhere else


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """One tensor of a group and the slice of it that one rank holds. All counts in elements.

    Attributes:
        name, shape: the tensor's.
        segment: the segment that it is in.
        offset, numel: where it lies in the segment's gathered buffer.
        begin, local_numel: where this rank's slice lies in this rank's shard; `begin` is inside the shard also for
            an empty slice.
        first: the slice's first element, counted in the tensor itself.
        local_shape, local_stride: of the slice: the flattened prefix, then the dimensions that are never cut.
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
    """Where the tensors of a layout lie, seen from one rank. Communicates nothing.

    Args:
        layout: planned for as many ranks as cut the buffer.
        rank: this rank among them.
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
        found = {}
        for spec in self.layout.tensors:
            found[spec.name] = self._slice(spec, *places[spec.name])
        return MappingProxyType(found)

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
        found = []
        for index, segment in enumerate(self.layout.segments):
            end = 0
            held = sorted(
                [
                    (s.begin, s.local_numel)
                    for s in self.slices.values()
                    if s.segment == index and s.local_numel
                ]
            )
            for begin, length in [*held, (segment.shard_size, 0)]:
                if begin > end:
                    found.append((index, end, begin - end))
                end = begin + length
        return tuple(found)

    def gaps_in(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The padding in this rank's slices, given one a segment."""
        return [flats[segment].narrow(0, begin, length) for segment, begin, length in self.gaps]

    @cached_property
    def placements(self) -> Mapping[str, RaggedShard]:
        """The placement of every tensor on the axis that cuts the buffer."""
        found = {}
        for name, one in self.slices.items():
            found[name] = RaggedShard(tuple(range(one.num_cut_dims)), self.layout.local_units(name))
        return MappingProxyType(found)

    def placement(self, name: str) -> RaggedShard:
        """The placement of a tensor on the axis that cuts the buffer. Raises KeyError for an unknown name."""
        return self.placements[name]

    def cut(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """This rank's slice of a whole tensor, in its local shape; shares memory where the tensor is contiguous."""
        found = self.slices[name]
        return value.reshape(-1).narrow(0, found.first, found.local_numel).view(found.local_shape)


# By the layout's identity, which holds while the value keeps the layout alive. Buffers of one group share a geometry.
_known: "weakref.WeakValueDictionary[tuple[int, int], Geometry]" = weakref.WeakValueDictionary()


def geometry_of(layout: Layout, rank: int) -> Geometry:
    """The geometry of a layout on a rank, worked out once while somebody uses it."""
    found = _known.get((id(layout), rank))
    if found is None:
        found = _known[id(layout), rank] = Geometry(layout, rank)
    return found


def alignment_problem(layout: Layout, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Which slice or tensor would start off a 16-byte boundary, in which dtype, and what to plan with instead."""
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


def first_difference(one: Layout, other: Layout) -> str | None:
    """The first thing in which two layouts differ, by the name of the tensor or segment; None where they are equal."""
    for what in ("world_size", "align"):
        if getattr(one, what) != getattr(other, what):
            return f"{what} is {getattr(one, what)} here, {getattr(other, what)} there"
    names, others = [s.name for s in one.tensors], [s.name for s in other.tensors]
    if odd := sorted(set(names) ^ set(others)):
        return f"tensor {odd[0]} is only {'here' if odd[0] in names else 'there'}"
    for spec in one.tensors:
        if spec != (match := other.spec(spec.name)):
            return (
                f"tensor {spec.name} is {tuple(spec.shape)} in blocks {spec.block} here, "
                f"{tuple(match.shape)} in blocks {match.block} there"
            )
    for name in names:
        if _where(one, name) != _where(other, name):
            return f"tensor {name} is {_where(one, name)} here, {_where(other, name)} there"
    for index, (mine, theirs) in enumerate(zip(one.segments, other.segments, strict=True)):
        if mine.shard_size != theirs.shard_size:
            return f"segment {index} has shards of {mine.shard_size} elements here, {theirs.shard_size} there"
    return None if names == others else f"the tensors are in another order: {names} here, {others} there"


def _where(layout: Layout, name: str) -> str:
    return f"at element {layout.offset(name)} of segment {layout.segment_of(name)}"
