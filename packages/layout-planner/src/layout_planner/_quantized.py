"""Bytes that a gather of quantized blocks moves, with whole tiles and with tiles cut between rows.

whole    no tile is cut: a band of tile rows stays on one rank, so that at many ranks bands outgrow the shards
shared   cuts between rows as in bf16; each rank sends the scales of the tiles that it holds rows of, and one
         MAX all-reduce an optimizer step shares the largest magnitudes of those that were cut

sent by a rank     codes, one byte an element:   | tensor a  | b |   c   |/ padding |
                   scales, four bytes a tile:    | a | b |c |/ padding to the largest rank's, and to 16 bytes |
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from layout_planner._blocks import Block, Elements, Rows, Tile, Whole
from layout_planner._checks import check_integers, check_world_size
from layout_planner._layout import Layout
from layout_planner._plan import plan
from layout_planner._spec import TensorSpec

LIMIT = 0.55  # of bf16's bytes: above it whole tiles cost more than sharing the magnitudes of cut ones
_SCALE = 4  # bytes
_ALIGN = 16  # bytes, and elements of codes

Cut = Literal["whole", "shared"]


@dataclass(frozen=True)
class QuantizedPlan:
    """A group's layouts with whole tiles and with cut ones, and the bytes of a gather with either.

    Bytes are those of the gathered group, padding included; a rank receives (world_size - 1) / world_size of them.

    Attributes:
        tile: rows and columns that share a scale.
        bf16: the layout of a gather in bf16, with the blocks that the tensors have.
        whole: with blocks of whole tiles.
        shared: with the blocks that the tensors have; for tiles of one row the same as `whole`.
    """

    tile: tuple[int, int]
    bf16: Layout
    whole: Layout
    shared: Layout

    @cached_property
    def bf16_bytes(self) -> int:
        """Bytes of a gather in bf16."""
        return 2 * self.bf16.padded_numel

    @cached_property
    def whole_bytes(self) -> int:
        """Codes and scales with whole tiles."""
        return _gather_bytes(self.whole, self.tile)

    @cached_property
    def shared_bytes(self) -> int:
        """Codes and scales with tiles cut between rows."""
        return _gather_bytes(self.shared, self.tile)

    @cached_property
    def amax_bytes(self) -> int:
        """Bytes of the all-reduce that shares magnitudes of the tiles that `shared` cuts, once an optimizer step."""
        return sum(
            _SCALE * len(_cut_bands(self.shared, spec, self.tile)) * -(-spec.shape[-1] // self.tile[1])
            for spec in self.shared.tensors
        )

    @property
    def cut(self) -> Cut:
        """The choice of `cut="auto"`: "shared" where whole tiles take more than 0.55 of bf16's bytes, and it fewer."""
        if self.whole_bytes <= LIMIT * self.bf16_bytes or self.whole_bytes <= self.shared_bytes:
            return "whole"
        return "shared"

    @property
    def auto_bytes(self) -> int:
        """Codes and scales with the better of both, `cut`."""
        return self.shared_bytes if self.cut == "shared" else self.whole_bytes


def plan_quantized(
    tensors: Sequence[TensorSpec], world_size: int, tile: tuple[int, int], *, max_segments: int = 4
) -> QuantizedPlan:
    """Plan a group's gathers in bf16 and as quantized tiles, whole and cut between rows. Pure, as `plan` is.

    Args:
        tensors: the group: matrices, or stacks of them, whose blocks are whole rows. Bands of whole tiles meet
            these blocks by their least common multiple.
        world_size: ranks that share the group.
        tile: rows and columns that share a scale; `(128, 128)`.
        max_segments: the most segments to split the group into.

    Raises:
        ValueError: as `plan`, a tensor of fewer than two dimensions, or one whose blocks end inside a row; the
            message names it.
    """
    check_world_size(world_size)
    tile = (tile[0], tile[1])
    check_integers(f"tile {tile}: a size", tile, 1)
    for spec in tensors:
        _check_rows(spec, tile)
    bf16 = plan(tensors, world_size, max_segments=max_segments)
    shared = plan(tensors, world_size, align=_ALIGN, max_segments=max_segments)
    banded = [replace(spec, block=_with_tiles(spec, tile)) for spec in tensors]
    whole = shared if tile[0] == 1 else plan(banded, world_size, align=_ALIGN, max_segments=max_segments)
    return QuantizedPlan(tile, bf16, whole, shared)


def _check_rows(spec: TensorSpec, tile: tuple[int, int]) -> None:
    if len(spec.shape) < 2:
        raise ValueError(
            f"{spec.name}: a tensor of shape {spec.shape} has no tiles; plan it in a group that is not quantized"
        )
    width = spec.shape[-1]
    if spec.grid.block % width or spec.grid.period % width:
        raise ValueError(
            f"{spec.name}: its block {spec.block} ends inside a row of {width}; use blocks of whole rows"
        )
    if spec.period is not None and spec.period % (spec.shape[-2] * width) and spec.period % (tile[0] * width):
        raise ValueError(
            f"{spec.name}: blocks start over after {spec.period} elements, where tiles of {tile} of a tensor of shape "
            f"{spec.shape} do not; give each stacked matrix a dimension of its own"
        )


def _with_tiles(spec: TensorSpec, tile: tuple[int, int]) -> Block:
    """The least block that is made of the tensor's own blocks and of whole bands of tiles."""
    match spec.block:
        case Whole():
            return spec.block
        case Rows(count) | Tile(count, _):
            rows = count
        case Elements(count):
            rows = count // spec.shape[-1]
    return Tile(math.lcm(rows, tile[0]), tile[1])


def _gather_bytes(layout: Layout, tile: tuple[int, int]) -> int:
    """Codes and scales, gathered, with all padding."""
    scales = [0] * layout.world_size
    for spec in layout.tensors:
        across = -(-spec.shape[-1] // tile[1])
        for rank, start, stop in _rows_held(layout, spec):
            scales[rank] += (_band(spec, tile, stop - 1) - _band(spec, tile, start) + 1) * across
    plane = -(-max(scales) * _SCALE // _ALIGN) * _ALIGN
    return layout.padded_numel + layout.world_size * plane


def _cut_bands(layout: Layout, spec: TensorSpec, tile: tuple[int, int]) -> set[int]:
    """The bands that a rank boundary falls inside of."""
    return {
        _band(spec, tile, start)
        for _, start, _ in _rows_held(layout, spec)
        if start and _band(spec, tile, start) == _band(spec, tile, start - 1)
    }


def _rows_held(layout: Layout, spec: TensorSpec) -> list[tuple[int, int, int]]:
    """(rank, first row, row after the last) for each rank that holds rows of the tensor."""
    width, offset = spec.shape[-1], layout.offset(spec.name)
    size = layout.segments[layout.segment_of(spec.name)].shard_size
    ranks = range(offset // size, (offset + spec.numel - 1) // size + 1)
    ends = [(rank, layout.local_range(spec.name, rank)) for rank in ranks]
    return [(rank, start // width, stop // width) for rank, (start, stop) in ends]


def _band(spec: TensorSpec, tile: tuple[int, int], row: int) -> int:
    """The band of a row: tiles start over in each stacked matrix."""
    matrix = spec.shape[-2]
    return row // matrix * -(-matrix // tile[0]) + row % matrix // tile[0]
