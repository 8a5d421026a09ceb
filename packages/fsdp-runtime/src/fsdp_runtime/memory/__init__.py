"""Memory of units, for plans on paper and for meters; `memory.activations` keeps activations in CPU memory."""

import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from dbuffer import RecyclerStats

from .._params.unit import Unit
from .._plan.group import GroupMemory
from .._schedule.model import Member, member_of
from .._torch_compat import fake_tensors

__all__ = ["UnitMemory", "fake_tensors", "gathered_memory", "unit_memory"]


@dataclass(frozen=True, kw_only=True)
class UnitMemory(GroupMemory):
    """One unit's memory on this rank, in bytes unless it says elements.

    Attributes:
        name: the unit's, in the root.
        parameters: elements of its parameters, on all ranks together.
        shards: elements of this rank's slices, one a segment.
        padding: elements of all ranks' shards that hold no parameter.
        weights: of the shards; where weights are kept as codes, of codes and scales.
        gradients: of the gradients' shards, from the reduction until `.grad` is dropped.
        sent: what a gather sends to each other rank.
        codes: of weights that are quantized before a gather, kept in addition to the shards.
        decoding: of each plane that a gather of quantized weights holds in addition, until they are read back.
        reduced: what a reduction gives to each other rank.
        gathered: of each gathered buffer, while the parameters are unsharded.
        reducing: of each gathered gradient buffer, while backward fills it and until the reduction has completed.
        scratch: what a reduction under way holds in addition.
        kept_after_forward: whether the gathered buffers stay until backward.
    """

    name: str
    parameters: int
    shards: tuple[int, ...]
    padding: int
    scratch: int
    kept_after_forward: bool


def unit_memory(module: nn.Module) -> UnitMemory:
    """The memory of the unit that `fully_shard` made of a module, at rest and while it runs. Communicates nothing.

    Parameters may be on meta or fake: nothing is measured, all follows from the plan. Raises ValueError if
    `fully_shard` was not called on this module.
    """
    unit = _member(module).unit
    elements = sum(math.prod(param.shape) for param in unit.params)
    memories: list[dict[str, Any]] = [vars(group.memory()) for group in unit.groups]
    none = vars(GroupMemory())  # numbers are added, tuples joined
    return UnitMemory(
        **{name: sum((memory[name] for memory in memories), start=start) for name, start in none.items()},
        name=unit.name,
        parameters=elements,
        shards=tuple(size for group in unit.groups for size in group.segment_sizes()),
        padding=sum(g.plan.data.shard_size * sum(g.segment_sizes()) for g in unit.groups) - elements,
        scratch=_scratch(unit),
        kept_after_forward=not unit.reshard_after_forward,
    )


def _scratch(unit: Unit) -> int:
    """Bytes of one reduction: one call for each mesh."""
    total = 0
    for data in unit.meshes:
        plans = [group.plan for group in unit.groups if group.plan.data == data and group.memory().reducing]
        forms = [(p.reduction, p.geometry, p.dtypes.reduce) for p in plans if p.reduction is not None]
        if forms and data.shard_size > 1:
            total += forms[0][0].scratch_bytes(forms)
    return total


def gathered_memory(module: nn.Module) -> RecyclerStats:
    """Bytes of gathered buffers, now and at the peak, on the device of a sharded module; of all its models together.

    Raises ValueError if `fully_shard` was not called on this module.
    """
    return _member(module).passes.streams.recycler.stats


def _member(module: nn.Module) -> Member:
    member = member_of(module)
    if member is None:
        raise ValueError(f"{type(module).__name__} is no unit; pass a module that fully_shard was called on")
    return member
