"""Which rank holds which elements of a parameter, and with whom its matrices are exchanged.

    placements                               exchanged along    ranks of the other axes
    ---------------------------------------  -----------------  ------------------------------------------------
    none (a plain tensor), all Replicate     nothing            do the same work
    (RaggedShard,)  (Shard(0),)              that axis
    (Replicate, RaggedShard or Shard(0))     the second axis    do the same work (HSDP: each replica for itself)
    (Shard(0), RaggedShard or Shard(0))      the second axis    have other matrices (expert parallelism)
    (StridedRaggedShard, Shard(0))           the first axis     have other matrices

A Shard(0) that is not exchanged along must cut between matrices. Anything else raises.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from block_optim._params import Param
from ragged_shard import RaggedShard, StridedRaggedShard


@dataclass(frozen=True)
class Held:
    """Elements [cuts[r], cuts[r + 1]) of the flattened tensor are at rank r of the group.

    Attributes:
        group: None where every rank that takes part holds all that it works on.
        rank: this rank's in the group.
        cuts: one more than there are ranks.
    """

    group: dist.ProcessGroup | None
    rank: int
    cuts: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """Ranks in the group."""
        return len(self.cuts) - 1

    @property
    def start(self) -> int:
        """The first element here."""
        return self.cuts[self.rank]


def held_by(param: Param) -> Held:
    """Who holds what of a parameter. Reads placements only; the same on every rank of the group.

    Raises:
        NotImplementedError: placements outside the table above; names the parameter and the way out.
    """
    placements, mesh = param.placements, param.mesh
    sharded = [
        axis
        for axis, p in enumerate(placements)
        if not isinstance(p, Replicate) and mesh.size(axis) > 1  # type: ignore[union-attr]
    ]
    if mesh is None or not sharded:
        return Held(None, 0, (0, param.numel))
    exchanged = next((a for a in sharded if isinstance(placements[a], RaggedShard)), sharded[-1])
    rest = [axis for axis in sharded if axis != exchanged]
    known = all(type(placements[a]) is Shard and placements[a].dim in (0, -len(param.shape)) for a in rest)
    here = placements[exchanged]
    strided = isinstance(here, StridedRaggedShard)
    if not known or any((a > exchanged) != strided for a in rest) or not _cuts_rows_or_runs(here, param):
        raise NotImplementedError(
            f"{param.name}: Muon cannot work on placements {placements} (shape {tuple(param.shape)}); it takes "
            "RaggedShard or Shard(0) along one mesh axis, beside Replicate or a Shard(0) between stacked matrices. "
            "Redistribute the parameter, or give it to AdamW"
        )
    first, last = 0, param.shape[0]
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "an optimizer is made by ranks of its parameters' meshes"
    for axis in rest:
        low, high = _chunk(last - first, mesh.size(axis), coordinate[axis])
        first, last = first + low, first + high
    inner = math.prod(param.shape[1:])
    base = (last - first, *param.shape[1:])
    cuts = tuple(first * inner + cut for cut in _cuts(here, base, mesh.size(exchanged)))
    return Held(mesh.get_group(exchanged), coordinate[exchanged], cuts)


def _cuts_rows_or_runs(placement: Any, param: Param) -> bool:
    if isinstance(placement, RaggedShard):
        return True
    return type(placement) is Shard and placement.dim in (0, -len(param.shape))


def _cuts(placement: Any, base: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Where the parts of a base tensor begin, in elements, and the end."""
    if isinstance(placement, RaggedShard):
        prefix = math.prod(base[: len(placement.dims)])
        rest = math.prod(base[len(placement.dims) :])
        ends = [placement.unit_range(rank)[1] for rank in range(ranks)]
        return (0, *(prefix * end // placement.total_units * rest for end in ends))
    inner = math.prod(base[1:])
    return (0, *(_chunk(base[0], ranks, rank)[1] * inner for rank in range(ranks)))


def _chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """What Shard(0) gives part ``index``: equal chunks, the last ones short or empty."""
    step = -(-size // parts)
    return min(size, step * index), min(size, step * (index + 1))
