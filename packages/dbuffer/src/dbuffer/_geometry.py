"""Where a rank's part of every tensor lies: arithmetic on a `Layout`, no memory.

segment buffer   |   rank 0   |   rank 1   |   rank 2   |
tensor t             [offset ... offset + numel]
rank 1's slice                [begin, begin + local_numel] counted from the slice's start
"""

import math
from dataclasses import dataclass

import torch

from layout_planner import Layout

_ALIGNMENT = 16  # bytes; below it NCCL falls back to copies of single elements


@dataclass(frozen=True)
class Piece:
    """One tensor of a group, and the part of it that one rank holds. All counts in elements.

    Attributes:
        segment: which buffer it is in.
        offset, numel: where it lies in the whole buffer.
        begin, local_numel: where this rank's part lies in this rank's slice; `begin` is in the slice also for an
            empty part.
        first: the part's first element, counted in the tensor itself.
        local_shape: of the part: the flattened prefix, then the dimensions that are never cut.
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


def pieces_of(layout: Layout, rank: int) -> tuple[Piece, ...]:
    """Every tensor of the layout in the order of the group, with `rank`'s part."""
    return tuple(_piece(layout, spec.name, rank) for spec in layout.tensors)


def _piece(layout: Layout, name: str, rank: int) -> Piece:
    spec, segment, offset = layout.spec(name), layout.segment_of(name), layout.offset(name)
    size = layout.segments[segment].shard_size
    start, stop = layout.local_range(name, rank)
    begin = min(max(offset + start - rank * size, 0), size)
    suffix = tuple(spec.shape[len(layout.local_dims(name)) :])
    local_shape = ((stop - start) // math.prod(suffix), *suffix)
    return Piece(
        name, tuple(spec.shape), segment, offset, spec.numel, begin, start, stop - start, local_shape
    )


def gaps_of(layout: Layout, pieces: tuple[Piece, ...]) -> list[tuple[int, int, int]]:
    """The runs `(segment, begin, length)` of this rank's slices that hold padding."""
    found = []
    for index, segment in enumerate(layout.segments):
        end = 0
        held = sorted((p.begin, p.local_numel) for p in pieces if p.segment == index and p.local_numel)
        for begin, length in [*held, (segment.shard_size, 0)]:
            if begin > end:
                found.append((index, end, begin - end))
            end = begin + length
    return found


def alignment_problem(layout: Layout, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Which slice or tensor would start off a 16-byte boundary in which dtype, and what to plan with instead."""
    narrowest = min(dtypes, key=lambda dtype: dtype.itemsize)
    itemsize = narrowest.itemsize
    advice = f"in {narrowest}; plan with align={_ALIGNMENT // math.gcd(_ALIGNMENT, itemsize)}"
    for index, segment in enumerate(layout.segments):
        for name, offset in zip(segment.names, segment.offsets, strict=True):
            if offset * itemsize % _ALIGNMENT:
                return f"{name} starts at byte {offset * itemsize}, not a multiple of {_ALIGNMENT}, {advice}"
        if segment.shard_size * itemsize % _ALIGNMENT:
            return (
                f"segment {index} ({segment.names[0]}, ...): a rank's slice has {segment.shard_size * itemsize} bytes, "
                f"not a multiple of {_ALIGNMENT}, {advice}"
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
            return f"tensor {spec.name} is {_describe(spec)} here, {_describe(match)} there"
    for name in names:
        if _where(one, name) != _where(other, name):
            return f"tensor {name} is {_where(one, name)} here, {_where(other, name)} there"
    for index, (mine, theirs) in enumerate(zip(one.segments, other.segments, strict=True)):
        if mine.shard_size != theirs.shard_size:
            return f"segment {index} has shards of {mine.shard_size} elements here, {theirs.shard_size} there"
    return None if names == others else f"the tensors are in another order: {names} here, {others} there"


def _describe(spec: object) -> str:
    return f"{tuple(spec.shape)} in blocks {spec.block}"  # type: ignore[attr-defined]


def _where(layout: Layout, name: str) -> str:
    return f"at element {layout.offset(name)} of segment {layout.segment_of(name)}"
