"""The elements of a tensor that each rank holds. Only this module reads placements.

    placements                               ranks that a Holding spans
    ---------------------------------------  ----------------------------------------------------------------------
    none (a plain tensor), all Replicate     one: each rank holds all of it; a mesh's ranks where the caller divides
                                             the work between them (`copies_on`)
    RaggedShard, StridedRaggedShard, Shard,  ranks of all axes that cut the tensor (FSDP alone; FSDP with tensor or
    torch's _StridedShard                    expert parallelism: their product), except axes that leave what must be
                                             seen as a whole on one of their ranks, such as experts' axes
    Replicate on some axes (HSDP)            those axes are left out: their ranks hold the same

A mesh axis of size 1 cuts nothing, with any placement. Other placements are refused. Asking for the process group
of several axes makes one, the first time, and communicates for that; else nothing here communicates.
"""

import itertools
import math
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from block_optim.core._torch_compat import SHARDS, dtensor_around, local_of, new_ordered_group
from block_optim.core.pieces import Piece, pieces_of, run
from ragged_shard import RaggedDTensor, RaggedShard, held_boxes
from ragged_shard.dist import DISTRIBUTED

Range = tuple[int, int]  # elements [start, stop)
Placements = Sequence[Placement]  # one for each mesh axis

# Joint meshes by rank tuple, cached for each process group, as long as it exists.
_JOINT: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], DeviceMesh]]" = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True)
class Holding:
    """The elements of a tensor on each of some ranks."""

    mesh: DeviceMesh | None  # the tensor's mesh; None for a plain tensor
    # the mesh axes whose ranks these are; none where each rank holds all of it and works alone
    axes: tuple[int, ...]
    ranks: tuple[int, ...]  # their global ranks, in the order of everything here; () where there are no axes
    rank: int  # this rank's place among them
    # the pieces of each of them; less than the tensor where an axis that is left out cuts it, too
    by_rank: tuple[tuple[Piece, ...], ...]
    copies: bool = False  # whether each of several ranks holds all of it

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks, in their order. Makes it where no axis has it."""
        if self.mesh is None or not self.axes:
            return None
        return self.mesh.get_group(self.axes[0]) if len(self.axes) == 1 else self._joint_mesh().get_group()

    def _joint_mesh(self) -> DeviceMesh:
        assert self.mesh is not None
        known = _JOINT.setdefault(self.mesh.get_group(self.axes[0]), {})
        if self.ranks not in known:
            device, within = self.mesh.device_type, [self.mesh.get_group(axis) for axis in self.axes]
            known[self.ranks] = DeviceMesh.from_group(new_ordered_group(self.ranks, within, device), device)
        return known[self.ranks]

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.by_rank)

    @property
    def own(self) -> tuple[Piece, ...]:
        """The pieces on this rank."""
        return self.by_rank[self.rank]

    @property
    def numel(self) -> int:
        """Elements that this rank holds."""
        return sum(piece.numel for piece in self.own)

    @property
    def in_runs(self) -> bool:
        """Whether no rank holds more than one run of the flattened tensor."""
        return all(len(own) <= 1 and all(piece.rows == 1 for piece in own) for own in self.by_rank)

    @cached_property
    def _bounds(self) -> tuple[list[int], list[int]]:
        """For each rank: the end of the elements of all ranks up to it, and the start of those from it on."""
        ends = accumulate((max((p.stop for p in own), default=0) for own in self.by_rank), max)
        largest = max((p.stop for own in self.by_rank for p in own), default=0)
        firsts = [min((p.first for p in own), default=largest) for own in self.by_rank]
        return list(ends), list(accumulate(reversed(firsts), min))[::-1]

    def pieces(self, rank: int, start: int, stop: int) -> list[Piece]:
        """The pieces of elements [start, stop) on a rank, in the order of its local memory."""
        return [part for piece in self.by_rank[rank] for part in piece.within(start, stop)]

    def holders(self, *ranges: Range) -> tuple[tuple[int, int], ...]:
        """(rank, elements) of each rank that holds some of the ranges of elements [start, stop), in their order.

        None of them where each rank holds all.
        """
        if self.copies:
            return ()
        ends, firsts = self._bounds
        first = bisect_right(ends, min(start for start, _ in ranges))
        last = bisect_left(firsts, max(stop for _, stop in ranges))
        sizes = (
            (rank, sum(p.numel for start, stop in ranges for p in self.pieces(rank, start, stop)))
            for rank in range(first, last)
        )
        return tuple((rank, size) for rank, size in sizes if size)

    def in_order(self) -> "Holding":
        """The same, with the ranks in the order of the first element that they hold."""
        if len(self.axes) < 2:
            return self
        end = max((piece.stop for own in self.by_rank for piece in own), default=0)
        order = sorted(
            range(self.num_ranks), key=lambda r: min((piece.first for piece in self.by_rank[r]), default=end)
        )
        return replace(
            self,
            ranks=tuple(self.ranks[r] for r in order),
            rank=order.index(self.rank),
            by_rank=tuple(self.by_rank[r] for r in order),
        )

    def state(self, local: torch.Tensor, shape: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """A tensor of this shape, flattened and cut over the ranks, so that rank r holds `lengths[r]` elements.

        Shares the memory of `local`, which is this rank's run.
        """
        if self.mesh is None:
            return local
        ragged = RaggedShard(tuple(range(len(shape))), lengths) if self.axes else Replicate()
        if len(self.axes) > 1:
            return wrap_local(local, self._joint_mesh(), [ragged], shape, ragged=True)
        placements: list[Placement] = [Replicate()] * self.mesh.ndim
        for axis in self.axes:
            placements[axis] = ragged
        return wrap_local(local, self.mesh, placements, shape, ragged=bool(self.axes))


def cutting_axes(mesh: DeviceMesh | None, placements: Placements) -> list[int]:
    """The mesh axes whose ranks hold different elements."""
    if mesh is None:
        return []
    return [a for a, p in enumerate(placements) if not isinstance(p, Replicate) and mesh.size(a) > 1]


def holding_of(
    name: str,
    shape: Sequence[int],
    mesh: DeviceMesh | None,
    placements: Placements,
    units: Sequence[Sequence[Range]] | None = None,
) -> Holding:
    """The Holding of a tensor of this global shape, the same on all of its ranks.

    `units` are those that the caller needs whole, each by its ranges of elements: axes that leave all of them on one of
    their ranks are left out; without units none is. ValueError for placements outside the module's table.
    """
    axes = cutting_axes(mesh, placements)
    if mesh is None or not axes:
        return Holding(mesh, (), (), 0, (run(0, math.prod(shape)),))
    for placement in placements:
        if type(placement) not in (*SHARDS, Replicate) and not isinstance(placement, RaggedShard):
            raise ValueError(
                f"{name}: placements {tuple(placements)} (shape {tuple(shape)}); expected RaggedShard, Shard and "
                "Replicate on the axes of its mesh. Redistribute the parameter, or give it to AdamW"
            )
    result = _over(axes, shape, mesh, placements)
    if len(axes) == 1 or units is None:
        return result
    last = next((a for a in axes if isinstance(placements[a], RaggedShard)), axes[-1])
    needed = [a for a in axes if a == last or _splits(result, axes.index(a), units)]
    return result if needed == axes else _over(needed, shape, mesh, placements)


def copies_on(mesh: DeviceMesh | None, holding: Holding) -> Holding:
    """The holding; where it is of one rank, of all ranks of a mesh, which hold the same and divide the work."""
    axes = [] if mesh is None else [a for a in range(mesh.ndim) if mesh.size(a) > 1]
    if mesh is None or holding.axes or not axes:
        return holding
    ranks = mesh.mesh.flatten().tolist()
    rank, by_rank = ranks.index(mesh.get_rank()), holding.by_rank * len(ranks)
    return Holding(mesh, tuple(axes), tuple(ranks), rank, by_rank, copies=True)


def _over(axes: Sequence[int], shape: Sequence[int], mesh: DeviceMesh, placements: Placements) -> Holding:
    own = mesh.get_coordinate()
    assert own is not None, "an optimizer is built by ranks of its parameters' meshes"
    # An axis of size 1 cuts nothing, also if its placement refers to other axes.
    plain = [p if a in axes or mesh.size(a) > 1 else Replicate() for a, p in enumerate(placements)]
    pieces, rank = [], 0
    for number, where in enumerate(itertools.product(*(range(mesh.size(a)) for a in axes))):
        coordinate = list(own)
        for axis, index in zip(axes, where, strict=True):
            coordinate[axis] = index
        pieces.append(pieces_of(held_boxes(shape, mesh.shape, plain, coordinate), shape))
        rank = number if coordinate == list(own) else rank
    line = tuple(slice(None) if a in axes else own[a] for a in range(mesh.ndim))
    ranks = tuple(mesh.mesh[line].flatten().tolist())
    return Holding(mesh, tuple(axes), ranks, rank, tuple(pieces))


def _splits(holding: Holding, position: int, units: Sequence[Sequence[Range]]) -> bool:
    """Whether several ranks of an axis, by its position among the holding's, hold some of one unit."""
    assert holding.mesh is not None
    sizes = [holding.mesh.size(a) for a in holding.axes]
    inner, size = math.prod(sizes[position + 1 :]), sizes[position]
    return any(len({rank // inner % size for rank, _ in holding.holders(*ranges)}) > 1 for ranges in units)


# ---------------------------------------------------------------- this rank's own elements, in any placement


def first_element(tensor: Any) -> int | None:
    """Start of this rank's run in the flattened tensor; None if its elements are not one run."""
    if not isinstance(tensor, DISTRIBUTED) or all(isinstance(p, Replicate) for p in tensor.placements):
        return 0
    boxes = [(c.offsets, c.sizes) for c in tensor.__create_chunk_list__() if math.prod(c.sizes)]
    count, pieces = local_of(tensor).numel(), pieces_of(boxes, tensor.shape)
    if not pieces:
        return None if count else 0
    return pieces[0].first if len(pieces) == pieces[0].rows == 1 and pieces[0].numel == count else None


def wrap_local(
    local: torch.Tensor, mesh: DeviceMesh | None, placements: Placements, shape: Sequence[int], ragged: bool
) -> torch.Tensor:
    """A global tensor of this shape around this rank's elements; these themselves where there is no mesh."""
    if mesh is None:
        return local
    if ragged:
        return RaggedDTensor.from_local(local, mesh, placements, shape=shape)
    return dtensor_around(local, mesh, placements, torch.Size(shape))
