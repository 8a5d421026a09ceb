"""The result of planning: where the tensors of a group lie.

    segment 0, shard size S0                      segment 1, shard size S1
    rank 0      rank 1      rank 2                rank 0   rank 1   rank 2
    |--- S0 ---|--- S0 ---|--- S0 ---|            |-- S1 --|-- S1 --|-- S1 --|
    [  tensor a   ][ b ][    c     ]/// padding   [     d     ][ e ]///// padding

Each segment is one 1-D buffer of `world_size` equal shards. A tensor is a contiguous run of one segment.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from layout_planner._blocks import parse_block
from layout_planner._bound import Bound, lower_bound
from layout_planner._checks import check_integer, check_world_size, shortened
from layout_planner._spec import Segment, TensorSpec
from layout_planner._table import percent

_FORMAT = 1


@dataclass(frozen=True)
class Layout:
    """The layout of a group's tensors. Checks itself, so every instance is valid.

    Args:
        tensors: the group, in the order given.
        world_size: shards per segment.
        align: elements that every shard size and offset is a multiple of.
        segments: the buffers; every tensor is in exactly one.

    Raises:
        ValueError: there are no tensors, or one is missing, repeated, unaligned, overlaps another, extends past its
            segment, or is cut inside a block.
    """

    tensors: tuple[TensorSpec, ...]
    world_size: int
    align: int
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        check_world_size(self.world_size)
        check_integer("align", self.align, 1)
        if not self.tensors:
            raise ValueError("there is nothing to lay out: the group has no tensors")
        placed = sorted([name for segment in self.segments for name in segment.names])
        if placed != sorted(self._by_name) or len(self._by_name) < len(self.tensors):
            raise ValueError(f"the segments hold {placed}, the group {sorted(s.name for s in self.tensors)}")
        for index, segment in enumerate(self.segments):
            self._check_segment(index, segment)

    def _check_segment(self, index: int, segment: Segment) -> None:
        size = check_integer(f"segment {index}: shard_size", segment.shard_size, 1)
        if size % self.align or len(segment.names) != len(segment.offsets) or not segment.names:
            raise ValueError(
                f"segment {index}: expected a shard size that is a positive multiple of {self.align} and as many "
                f"offsets as tensors, at least one; got {size}, {len(segment.offsets)} and {len(segment.names)}"
            )
        end, last = 0, "the start of the segment"
        for name, start in zip(segment.names, segment.offsets, strict=True):
            spec = self._by_name[name]
            if type(start) is not int or start < end or start % self.align:
                check_integer(f"{name}: offset", start, 0)
                raise ValueError(
                    f"{name}: offset {start} is not a multiple of {self.align}, or overlaps {last}, which ends at {end}"
                )
            end, last = start + spec.numel, name
            ranks = range(start // size + 1, min(self.world_size, (end - 1) // size) + 1)
            if ranks and not spec.grid.are_cuts(ranks.start * size - start, size, len(ranks)):
                rank = next(rank for rank in ranks if not spec.grid.is_cut(rank * size - start))
                raise ValueError(
                    f"{name}: rank {rank}'s shard starts inside a block, at element {rank * size - start}"
                )
        if end > self.world_size * size:
            raise ValueError(
                f"segment {index}: {last} ends at {end}, past {self.world_size} shards of {size}"
            )

    @cached_property
    def _by_name(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.tensors}

    @cached_property
    def _positions(self) -> dict[str, tuple[int, int]]:
        return {
            name: (index, offset)
            for index, segment in enumerate(self.segments)
            for name, offset in zip(segment.names, segment.offsets, strict=True)
        }

    def spec(self, tensor: str) -> TensorSpec:
        """The tensor of that name. Raises KeyError if the group has none."""
        try:
            return self._by_name[tensor]
        except KeyError:
            raise KeyError(f"{tensor!r} is not in this layout, which holds {sorted(self._by_name)}") from None

    def segment_of(self, tensor: str) -> int:
        """The index of the segment that holds the tensor."""
        return self._positions[self.spec(tensor).name][0]

    def offset(self, tensor: str) -> int:
        """Elements from the start of its segment's buffer to the tensor's first element."""
        return self._positions[self.spec(tensor).name][1]

    def local_range(self, tensor: str, rank: int) -> tuple[int, int]:
        """The range `[start, stop)` of the tensor's own elements that `rank` holds.

        The ranges of all ranks, in order, partition the tensor; a rank that holds none of it gets an empty range.

        Raises:
            ValueError: `rank` is outside the layout.
            KeyError: the group has no tensor of that name.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the {self.world_size} ranks of this layout")
        numel = self.spec(tensor).numel
        index, offset = self._positions[tensor]
        return self.segments[index].local_range(offset, numel, rank)

    def local_units(self, tensor: str) -> tuple[int, ...]:
        """Each rank's share of the tensor, in lowest terms: the `local_units` of a `RaggedShard`."""
        if tensor not in self._shares:
            numel = self.spec(tensor).numel
            index, offset = self._positions[tensor]
            lengths = self.segments[index].local_lengths(offset, numel, self.world_size)
            divisor = math.gcd(*lengths)
            self._shares[tensor] = tuple([length // divisor for length in lengths])
        return self._shares[tensor]

    def local_dims(self, tensor: str) -> tuple[int, ...]:
        """The shortest prefix of dimensions whose grid contains all cut points: the `dims` of a `RaggedShard`.

        Depends on block and shape alone, so a tensor's local shape has as many dimensions at every world size.
        """
        spec = self.spec(tensor)
        step = math.gcd(spec.grid.block, spec.grid.period)
        for length in range(min(1, len(spec.shape)), len(spec.shape)):
            if step % math.prod(spec.shape[length:]) == 0:
                return tuple(range(length))
        return tuple(range(len(spec.shape)))

    @cached_property
    def _shares(self) -> dict[str, tuple[int, ...]]:
        return {}

    @cached_property
    def numel(self) -> int:
        """Elements of all tensors together."""
        return sum(spec.numel for spec in self.tensors)

    @cached_property
    def padded_numel(self) -> int:
        """Elements of all segments' buffers: the size of the gathered group."""
        return self.world_size * sum(segment.shard_size for segment in self.segments)

    @property
    def padding(self) -> int:
        """Elements of the buffers that belong to no tensor."""
        return self.padded_numel - self.numel

    @property
    def padding_ratio(self) -> float:
        """Padding divided by the elements of the tensors; 0.01 is one per cent."""
        return self.padding / self.numel

    @cached_property
    def bound(self) -> Bound:
        """A proven lower bound on the size of all segments together, and the argument that proves it."""
        return lower_bound(self.tensors, self.world_size, self.align)

    @property
    def lower_bound(self) -> int:
        """Elements below which `padded_numel` cannot go, in any order and any split into segments."""
        return self.bound.numel

    @property
    def gap(self) -> float:
        """How far this layout is above the lower bound: 0 is proven optimal, 0.01 is one per cent above."""
        return self.padded_numel / self.lower_bound - 1

    def to_json(self) -> str:
        """The layout as canonical JSON: the same layout gives the same text in every process."""
        content = {
            "format": _FORMAT,
            "world_size": self.world_size,
            "align": self.align,
            "tensors": [{"name": s.name, "shape": s.shape, "block": str(s.block)} for s in self.tensors],
            "segments": [
                {"shard_size": s.shard_size, "names": s.names, "offsets": s.offsets} for s in self.segments
            ],
        }
        return json.dumps(content, separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Layout":
        """Read the output of `to_json`.

        Raises:
            ValueError: `text` is not JSON, of another format, or describes an invalid layout.
        """
        try:
            content: Any = json.loads(text)
            if content["format"] != _FORMAT:
                raise ValueError(f"its format is {content['format']}, this version reads {_FORMAT}")
            tensors = tuple(
                TensorSpec(s["name"], tuple(s["shape"]), parse_block(s["block"])) for s in content["tensors"]
            )
            segments = tuple(
                Segment(s["shard_size"], tuple(s["names"]), tuple(s["offsets"])) for s in content["segments"]
            )
            return cls(tensors, content["world_size"], content["align"], segments)
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"this is not a layout: {type(error).__name__}: {shortened(error)}") from error

    def fingerprint(self) -> str:
        """SHA-256 of `to_json`, in hex: two layouts are equal if and only if their fingerprints are."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_svg(self, *, title: str = "", ranks: range | None = None) -> str:
        """A picture of the layout to scale: one row per rank, tensors in colours, padding hatched.

        Args:
            title: a line above the picture.
            ranks: the ranks to draw. None: the first 16.

        Raises:
            ValueError: `ranks` is empty or reaches outside the layout.
        """
        from layout_planner._svg import draw  # training draws nothing

        figures = [
            ("elements", f"{self.numel:,}"),
            ("with padding", f"{self.padded_numel:,}"),
            ("padding", percent(self.padding_ratio)),
            (f"lower bound, by {self.bound.reason}", f"{self.lower_bound:,}"),
            ("gap to the bound", percent(self.gap)),
        ]
        return draw(self.segments, self._by_name, self.world_size, figures, title=title, ranks=ranks)
