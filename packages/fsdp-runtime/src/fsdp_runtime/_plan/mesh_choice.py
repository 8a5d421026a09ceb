"""The mesh of each parameter of a unit: the choice of `shard_placement_fn`, compared between ranks."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from ragged_shard.dist import same_on_all_ranks

from .. import _torch_compat as compat
from .mesh import DataMesh, data_mesh, data_mesh_of

PlacementFn = Callable[[nn.Parameter], Any]


def choose_meshes(
    names: Mapping[torch.Tensor, str], placement_fn: PlacementFn, default: DataMesh
) -> dict[torch.Tensor, DataMesh]:
    """Mesh of each parameter. Those over the same process groups get the same object, the unit's if it is among them.

    Issues one all-reduce of 64 bytes on each axis of the unit's mesh to check that all ranks choose the same meshes.
    Raises ValueError or TypeError on every rank, by the parameter's name: the function returned something else, or a
    mesh that this rank is not in; or ranks choose differently.
    """
    known = {default.groups: default}
    chosen: dict[torch.Tensor, DataMesh] = {}
    problem: Exception | None = None
    for param, name in names.items():
        answer = placement_fn(cast(nn.Parameter, param))
        try:
            data = _mesh_of(name, param, answer, default)
        except (TypeError, ValueError) as error:
            problem = problem or error
            continue
        chosen[param] = known.setdefault(data.groups, data)
    if not default.simulated:
        meshes = {f"the mesh of {names[param]}": _described(data) for param, data in chosen.items()}
        same_on_all_ranks(meshes, default.groups, error=problem, caller="shard_placement_fn")
    if problem is not None:
        raise problem
    return chosen


def _mesh_of(name: str, param: torch.Tensor, answer: Any, default: DataMesh) -> DataMesh:
    """Mesh that the function's return value stands for."""
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
            "ShardPlacementResult with one of the first two. Use block_policy for tensors that must stay whole"
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
    """A description of the mesh that is identical on every rank."""
    return f"{data.mesh.mesh_dim_names or 'unnamed'} of {tuple(data.mesh.shape)}"
