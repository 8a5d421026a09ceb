"""Which rank works on which strip, and where the state of a strip lies.

    ranks hold    |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ----|      (any contiguous runs in rank order)
    strips        |-- s0 --|-- s1 --|-- s2 --|-- s3 --|-- s4 --|- s5 -|

    s0 and s5 lie whole on ranks 0 and 3: those own them, nothing moves
    s1 is cut between 0 and 1: one of the two owns it; its gradient goes there, its update comes back

Owners of cut strips: the largest first, each to the least loaded of the ranks that hold a part of it, loads carried
over the whole model. Ownership never runs against rank order, so the state of a tensor's strips, laid end to end, is a
`RaggedShard` of one 1-D tensor: it goes through checkpoints at any world size, and memory is exactly what is owned.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from block_optim._params import Param, wrap_local
from block_optim._shampoo_blocks import Grid
from ragged_shard import RaggedShard

Range = tuple[int, int]


@dataclass(frozen=True)
class Cut:
    """How one tensor is cut: by which axis of its mesh, and what each rank of that axis holds (elements).

    `axis` is None where nothing is cut: a plain tensor, or Replicate on all axes.
    """

    mesh: DeviceMesh | None
    axis: int | None
    rank: int
    ranges: tuple[Range, ...]

    @property
    def own(self) -> Range:
        """This rank's range."""
        return self.ranges[self.rank]

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Over whose ranks it is cut."""
        return None if self.axis is None or self.mesh is None else self.mesh.get_group(self.axis)

    def state(self, local: torch.Tensor, shape: Sequence[int], units: Sequence[int]) -> torch.Tensor:
        """A global tensor around `local`, flattened and cut so that rank r holds `units[r]` elements.

        Shares the memory of `local` where that has the right shape. Communicates nothing.
        """
        if self.mesh is None:
            return local
        placements: list[Any] = [Replicate()] * self.mesh.ndim
        if self.axis is None:
            return wrap_local(local, self.mesh, placements, shape, ragged=False)
        placements[self.axis] = RaggedShard(tuple(range(len(shape))), units)
        return wrap_local(local, self.mesh, placements, shape, ragged=True)


def cut_of(param: Param) -> Cut:
    """How a parameter is cut.

    Raises:
        ValueError: two axes cut it, or one cuts another dimension than the first: its blocks are then no runs.
    """
    numel = param.numel
    cutting = [axis for axis, p in enumerate(param.placements) if not isinstance(p, Replicate)]
    if param.mesh is None or not cutting:
        return Cut(param.mesh, None, 0, ((0, numel),))
    axis = cutting[0]
    placement, size = param.placements[axis], param.mesh.size(axis)
    rank = param.mesh.get_local_rank(axis)
    if len(cutting) == 1 and isinstance(placement, RaggedShard):
        ends = [0]
        for units in placement.local_units:
            ends.append(ends[-1] + units)
        points = [numel * end // ends[-1] for end in ends]
        return Cut(param.mesh, axis, rank, tuple(pairwise(points)))
    if len(cutting) == 1 and type(placement) is Shard and placement.dim == 0:
        length = param.shape[0]
        row = numel // length if length else 0
        step = -(-length // size)
        ends = [min(length, step * r) * row for r in range(size + 1)]
        return Cut(param.mesh, axis, rank, tuple(pairwise(ends)))
    raise ValueError(
        f"{param.name}: placements {param.placements} cut it other than along its rows on one mesh axis; Shampoo and "
        "SOAP take RaggedShard or Shard(0) on one axis and Replicate on the others: give this parameter another "
        "optimizer (AdamW), or redistribute it"
    )


@dataclass
class Loads:
    """Work given to each rank of each process group so far."""

    by_group: dict[str, list[int]] = field(default_factory=dict)

    def of(self, cut: Cut) -> list[int]:
        """The loads of the ranks that a tensor is cut over."""
        group = cut.group
        name = "" if group is None else group.group_name
        return self.by_group.setdefault(name, [0] * len(cut.ranges))


@dataclass(frozen=True)
class Ownership:
    """Owner of each strip of one tensor, and which strips no rank holds whole.

    Attributes:
        owners: rank (of the cut axis) per strip, never decreasing.
        moving: indices of strips whose parts must travel.
    """

    grid: Grid
    cut: Cut
    owners: tuple[int, ...]
    moving: tuple[int, ...]

    @property
    def owned(self) -> range:
        """This rank's strips: consecutive."""
        mine = [i for i, owner in enumerate(self.owners) if owner == self.cut.rank]
        return range(mine[0], mine[-1] + 1) if mine else range(0)

    @property
    def owned_range(self) -> Range:
        """The elements that this rank owns: one run."""
        strips = self.owned
        if not strips:
            return 0, 0
        return self.grid.strip(strips[0]).start, self.grid.strip(strips[-1]).stop

    def elements(self) -> list[int]:
        """Elements of the tensor that each rank owns."""
        totals = [0] * len(self.cut.ranges)
        for index, owner in enumerate(self.owners):
            strip = self.grid.strip(index)
            totals[owner] += strip.stop - strip.start
        return totals


def assign(tensors: Sequence[tuple[Grid, Cut]], loads: Loads) -> list[Ownership]:
    """Owners of all strips of all tensors: the same on every rank, from global metadata alone. Adds to `loads`."""
    owners: list[list[int]] = []
    moving: list[list[int]] = []
    waiting: list[tuple[int, int, int]] = []
    for number, (grid, cut) in enumerate(tensors):
        load, found, cuts = loads.of(cut), [0] * grid.num_strips, []
        for index in range(grid.num_strips):
            strip = grid.strip(index)
            holder = _holder(cut.ranges, strip.start, strip.stop)
            if holder is None:
                cuts.append(index)
                waiting.append((-grid.cost(strip), number, index))
            else:
                found[index] = holder
                load[holder] += grid.cost(strip)
        owners.append(found)
        moving.append(cuts)
    for cost, number, index in sorted(waiting):
        grid, cut = tensors[number]
        load, strip = loads.of(cut), grid.strip(index)
        held = [overlap(r, (strip.start, strip.stop)) for r in cut.ranges]
        touching = [rank for rank, size in enumerate(held) if size]
        best = min(touching, key=lambda rank: (load[rank], -held[rank], rank))
        load[best] -= cost
        owners[number][index] = best
    return [
        Ownership(grid, cut, tuple(own), tuple(cuts))
        for (grid, cut), own, cuts in zip(tensors, owners, moving, strict=True)
    ]


def overlap(one: Range, other: Range) -> int:
    """Elements that two ranges share."""
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))


def _holder(ranges: Sequence[Range], start: int, stop: int) -> int | None:
    for rank, (first, last) in enumerate(ranges):
        if first <= start and stop <= last:
            return rank
    return None
