"""Which mesh each parameter of a unit is cut over: what `shard_placement_fn` says, agreed on by all ranks."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from .. import _torch_compat as compat
from .mesh import DataMesh, data_mesh, data_mesh_of

PlacementFn = Callable[[nn.Parameter], Any]
_WORDS = 4  # of 62 bits, of a digest


def choose_meshes(
    names: Mapping[torch.Tensor, str], placement_fn: PlacementFn, default: DataMesh
) -> dict[torch.Tensor, DataMesh]:
    """The mesh of each parameter. Those over the same process groups get the same object, the unit's where it is one.

    Issues one all-reduce of 64 bytes on each axis of the unit's mesh to check that all ranks choose the same meshes.

    Raises:
        ValueError, TypeError: naming the parameter: the function returned something else, or a mesh that this rank is
            not in; or ranks that choose differently. On every rank.
    """
    known = {default.groups: default}
    chosen: dict[torch.Tensor, DataMesh] = {}
    problem: Exception | None = None
    for param, name in names.items():
        answer = placement_fn(cast(nn.Parameter, param))
        try:
            found = _mesh_of(name, param, answer, default)
        except (TypeError, ValueError) as error:
            problem = problem or error
            continue
        chosen[param] = known.setdefault(found.groups, found)
    said = {names[param]: _described(data) for param, data in chosen.items()}
    if not default.simulated:
        _agree(said, problem, default)
    if problem is not None:
        raise problem
    return chosen


def _mesh_of(name: str, param: torch.Tensor, answer: Any, default: DataMesh) -> DataMesh:
    """What the function's answer for one parameter means."""
    placement, data = answer, default
    if compat.ShardPlacementResult is not None and isinstance(answer, compat.ShardPlacementResult):
        placement = answer.placement
        try:
            data = data_mesh_of(answer.mesh_info)
        except (TypeError, ValueError) as error:
            raise type(error)(f"shard_placement_fn, for {name}: {error}") from error
    elif isinstance(answer, DeviceMesh):
        placement = None
        try:
            data = data_mesh(answer)
        except (TypeError, ValueError) as error:
            raise type(error)(f"shard_placement_fn, for {name}: {error}") from error
    if placement is not None and type(placement) is not Shard:
        raise ValueError(
            f"shard_placement_fn gave {placement!r} for {name}; expected None, Shard(dim), a DeviceMesh, or torch's "
            "ShardPlacementResult with one of the first two. Say with block_policy what must stay whole"
        )
    if placement is not None and not -param.ndim <= placement.dim < max(param.ndim, 1):
        raise ValueError(f"shard_placement_fn gave {placement} for {name}, which has {param.ndim} dimensions")
    if data.mesh.device_type != default.mesh.device_type:
        raise ValueError(
            f"shard_placement_fn gave {name} a mesh of {data.mesh.device_type}, but the unit computes on "
            f"{default.mesh.device_type}; its parameters must be on one kind of device"
        )
    return data


def _described(data: DataMesh) -> str:
    """A mesh in words that are the same on all ranks: each is in another slice of it."""
    return f"{data.mesh.mesh_dim_names or 'unnamed'} of {tuple(data.mesh.shape)}"


def _agree(said: Mapping[str, str], problem: Exception | None, unit: DataMesh) -> None:
    """Raise ValueError where another rank of the unit's mesh said something else, or had a problem."""
    digest = hashlib.sha256(f"{sorted(said.items())} {problem!r}".encode()).digest()
    words = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") >> 2 for i in range(_WORDS)]
    both = torch.tensor(words + [-word for word in words], device=unit.device)
    for group in unit.groups:
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    largest, smallest = both.view(2, _WORDS).tolist()
    if largest == [-word for word in smallest]:
        return
    everyone: list[Any] = [(dict(said), None if problem is None else str(problem))]
    for group in unit.groups:
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, everyone, group=group)
        everyone = [one for listed in found for one in listed]
    if problem is not None:
        return
    for theirs, trouble in everyone:
        if trouble is not None:
            raise ValueError(f"shard_placement_fn failed on another rank: {trouble}")
        for name in sorted(said.keys() | theirs.keys()):
            here, there = said.get(name, "no such parameter"), theirs.get(name, "no such parameter")
            if here != there:
                raise ValueError(
                    f"the ranks do not agree on the mesh of {name}: {here} here, {there} on another rank; "
                    "shard_placement_fn must choose alike everywhere"
                )
