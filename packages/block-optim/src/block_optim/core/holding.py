"""Which rank holds which elements of a tensor. All other modules ask here; only this one reads placements.

    placements                               cut along          ranks of the other axes
    ---------------------------------------  -----------------  ---------------------------------------------
    none (a plain tensor), all Replicate     nothing            hold the same
    (RaggedShard,)  (Shard(0),)              that axis
    (Replicate, RaggedShard or Shard(0))     the second axis    hold the same (HSDP)
    (Shard(0), RaggedShard or Shard(0))      the second axis    hold other rows (expert parallelism)
    (StridedRaggedShard, Shard(0))           the first axis     hold other rows

A mesh axis of size 1 cuts nothing, whatever its placement. Other placements do not leave a rank one run of the
flattened tensor per axis; `holding_of` refuses them. Nothing here communicates.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from block_optim.core._torch_compat import DISTRIBUTED, local_of
from ragged_shard import RaggedDTensor, RaggedShard, StridedRaggedShard

Range = tuple[int, int]  # elements [start, stop)


@dataclass(frozen=True)
class Holding:
    """Rank r of a mesh axis holds elements [cuts[r], cuts[r + 1]) of the flattened tensor.

    Attributes:
        mesh: the tensor's mesh; None for a plain tensor.
        axis: the mesh axis that cuts the tensor into runs; None where each rank holds all of it.
        rank: this rank's coordinate on the axis.
        cuts: ascending, one more than the axis has ranks. They span less than the tensor where a `Shard(0)` on
            another axis leaves the rest to other ranks.
    """

    mesh: DeviceMesh | None
    axis: int | None
    rank: int
    cuts: tuple[int, ...]

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of the axis."""
        return None if self.mesh is None or self.axis is None else self.mesh.get_group(self.axis)

    @property
    def num_ranks(self) -> int:
        """Ranks on the axis."""
        return len(self.cuts) - 1

    @property
    def own(self) -> Range:
        """The elements that this rank holds."""
        return self.cuts[self.rank], self.cuts[self.rank + 1]

    def touching(self, start: int, stop: int) -> list[int]:
        """The ranks between whose cuts elements [start, stop) lie, in order; some may hold nothing of them."""
        rank = max(bisect_right(self.cuts, start) - 1, 0)
        found = []
        while rank < self.num_ranks and self.cuts[rank] < stop:
            found.append(rank)
            rank += 1
        return found

    def held(self, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """(rank, elements) of each rank that holds some of elements [start, stop)."""
        sizes = (
            (rank, min(self.cuts[rank + 1], stop) - max(self.cuts[rank], start))
            for rank in self.touching(start, stop)
        )
        return tuple((rank, size) for rank, size in sizes if size > 0)

    def state(self, local: torch.Tensor, shape: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """A tensor of this shape, flattened and cut along the same axis so that rank r holds `lengths[r]` elements.

        Shares the memory of `local`, which is this rank's run.
        """
        if self.mesh is None:
            return local
        placements: list[Placement] = [Replicate()] * self.mesh.ndim
        if self.axis is not None:
            placements[self.axis] = RaggedShard(tuple(range(len(shape))), lengths)
        return wrap_local(local, self.mesh, placements, shape, ragged=self.axis is not None)


def cutting_axes(mesh: DeviceMesh | None, placements: Sequence[Placement]) -> list[int]:
    """The mesh axes whose ranks hold different elements."""
    if mesh is None:
        return []
    return [a for a, p in enumerate(placements) if not isinstance(p, Replicate) and mesh.size(a) > 1]


def holding_of(
    name: str,
    shape: Sequence[int],
    mesh: DeviceMesh | None,
    placements: Sequence[Placement],
    coordinate: Sequence[int] | None = None,
) -> Holding:
    """Who holds what of a tensor; the same on every rank of the axis that cuts it.

    Args:
        name: for messages.
        shape: of the global tensor.
        mesh: None for a plain tensor.
        placements: one for each mesh axis.
        coordinate: the rank's on each mesh axis; None: this rank's.

    Raises:
        ValueError: placements outside the module's table.
    """
    cutting = cutting_axes(mesh, placements)
    if mesh is None or not cutting:
        return Holding(mesh, None, 0, (0, math.prod(shape)))
    axis = next((a for a in cutting if isinstance(placements[a], RaggedShard)), cutting[-1])
    outer = [a for a in cutting if a != axis]
    placement = placements[axis]
    strided = isinstance(placement, StridedRaggedShard)
    known = all(_cuts_rows(placements[a], shape) and (a > axis) == strided for a in outer)
    if not known or not (isinstance(placement, RaggedShard) or _cuts_rows(placement, shape)):
        raise ValueError(
            f"{name}: placements {tuple(placements)} cut it other than along its rows (shape {tuple(shape)}); "
            "matrices and blocks may lie as RaggedShard or Shard(0) on one mesh axis, with Replicate or a Shard(0) "
            "between stacked matrices on the others. Redistribute the parameter, or give it to AdamW"
        )
    coordinate = mesh.get_coordinate() if coordinate is None else coordinate
    assert coordinate is not None, "an optimizer is built by ranks of its parameters' meshes"
    first, last = 0, shape[0]
    for a in outer:
        low, high = _chunk(last - first, mesh.size(a), coordinate[a])
        first, last = first + low, first + high
    base = first * math.prod(shape[1:])
    cuts = tuple(base + cut for cut in _cuts(placement, (last - first, *shape[1:]), mesh.size(axis)))
    return Holding(mesh, axis, coordinate[axis], cuts)


def _cuts_rows(placement: Placement, shape: Sequence[int]) -> bool:
    return type(placement) is Shard and placement.dim in (0, -len(shape))


def _cuts(placement: Placement, shape: Sequence[int], ranks: int) -> list[int]:
    """Where each rank's elements begin in a tensor of this shape, and the end."""
    if isinstance(placement, RaggedShard):
        numel = math.prod(shape)
        ends = [placement.unit_range(rank)[1] for rank in range(ranks)]
        return [0, *(numel * end // placement.total_units for end in ends)]
    row = math.prod(shape[1:])
    return [0, *(_chunk(shape[0], ranks, rank)[1] * row for rank in range(ranks))]


def _chunk(size: int, count: int, index: int) -> Range:
    """The rows that Shard(0) gives chunk `index` of `count`: equal chunks, the last ones short or empty."""
    step = -(-size // count)
    return min(size, step * index), min(size, step * (index + 1))


# ---------------------------------------------------------------- this rank's own elements, in any placement


def boxes_of(tensor: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The (offsets, sizes) of the boxes of a distributed tensor that this rank holds, empty ones left out."""
    found = ((tuple(c.offsets), tuple(c.sizes)) for c in tensor.__create_chunk_list__())
    return [(offsets, sizes) for offsets, sizes in found if math.prod(sizes)]


def first_element(tensor: torch.Tensor) -> int | None:
    """Where this rank's run begins in the flattened tensor; None where what it holds is not one run."""
    if not isinstance(tensor, DISTRIBUTED) or all(isinstance(p, Replicate) for p in tensor.placements):
        return 0
    boxes, count = boxes_of(tensor), local_of(tensor).numel()
    if sum(math.prod(size) for _, size in boxes) != count:
        return None
    if count == 0:
        return 0
    first = min(_flat_offset(offset, tensor.shape) for offset, _ in boxes)
    last = max(
        _flat_offset([o + s - 1 for o, s in zip(offset, size, strict=True)], tensor.shape)
        for offset, size in boxes
    )
    return first if last - first + 1 == count else None


def own_elements(target: Any, full: torch.Tensor) -> torch.Tensor:
    """This rank's elements of a full tensor, in the shape of `target`'s local tensor."""
    slices = []
    for offsets, sizes in boxes_of(target):
        index = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        slices.append(full[index].reshape(-1))
    local = local_of(target)
    return torch.cat(slices).view(local.shape) if slices else full.new_empty(local.shape)


def wrap_local(
    local: torch.Tensor,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement],
    shape: Sequence[int],
    ragged: bool,
) -> torch.Tensor:
    """A global tensor of this shape around this rank's elements; these themselves where there is no mesh."""
    if mesh is None:
        return local
    stride, running = [], 1
    for size in reversed(shape):
        stride.append(running)
        running *= max(size, 1)
    stride.reverse()
    if ragged:
        return RaggedDTensor.from_local(local, mesh, placements, shape=shape, stride=tuple(stride))
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )


def _flat_offset(index: Sequence[int], shape: Sequence[int]) -> int:
    """Of an element in the row-major flattened tensor."""
    offset = 0
    for i, size in zip(index, shape, strict=True):
        offset = offset * size + i
    return offset
