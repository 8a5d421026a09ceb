"""Ranks that build a model from different seeds would each keep a slice of another one. It shows in the first forward.

Each rank takes a digest of every parameter that it shards, and `DBuffer` compares them where it compares layouts.
Different values are no error until they are used: others may be loaded before.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from .._plan.mesh import DataMesh
from .group import Group
from .unit import Unit


def check_same_values(units: Iterable[Unit]) -> None:
    """Raise RuntimeError, on all ranks of a mesh, if they use different values that they gave `fully_shard`.

    Communicates only where they gave different ones: an all-reduce of a byte a group on each axis.
    """
    differ: dict[DataMesh, list[tuple[str, Group]]] = {}
    for unit in units:
        for group in unit.groups:
            if group.buffer is not None and not group.buffer.alike:
                differ.setdefault(group.plan.data, []).append((unit.name, group))
    for data, members in differ.items():
        kept = torch.tensor([group.keeps_initial for _, group in members], dtype=torch.uint8).to(data.device)
        for ranks in data.groups:
            dist.all_reduce(kept, dist.ReduceOp.MIN, group=ranks)
        found = zip(members, kept.tolist(), strict=True)
        if names := dict.fromkeys(name for (name, _), on_all in found if on_all):
            raise RuntimeError(
                f"ranks gave fully_shard different values of {', '.join(names)}: each would train its slice of another "
                "model. Call torch.manual_seed with the same number on every rank before building the model, or load "
                "values after fully_shard, as set_full_state_dict(model, state_dict, rank0_only=True) sends rank 0's"
            )
