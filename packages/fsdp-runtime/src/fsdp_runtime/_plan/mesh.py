"""The mesh that a unit is cut over, and how a parameter of another parallelism joins it."""

import hashlib
import itertools
import math
import weakref
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from ragged_shard import RaggedShard, StridedRaggedShard, held_boxes
from ragged_shard.device import CPU
from ragged_shard.dist import DISTRIBUTED

from .. import _torch_compat as compat

# For each shard axis's process group: one more of its ranks, for reductions, and groups of neighbors by their count.
_REDUCTIONS: "weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = weakref.WeakKeyDictionary()
_NEIGHBORS: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]]" = (
    weakref.WeakKeyDictionary()
)


class WrongCallError(ValueError, AssertionError):
    """A wrong argument for which FSDP2 raises AssertionError: scripts that catch either type go on."""


class DataMesh:
    """The data-parallel mesh of parameters of a unit. Equal to itself alone; `groups` says whether two are one.

    Attributes:
        mesh: of one dimension (shard) or two (replicate, shard).
        spmd: the full mesh that parameters are DTensors on, where the user gave one (`dp_mesh_dims`), else None.
        dp_names: the dimensions of `spmd` that are data parallel.
        hybrid: whether shards are also copied over a second axis (HSDP).
        shard_size: ranks that a parameter is cut over.
        shard_rank: this rank among them.
        num_replicas: ranks that hold the same shard.
        fingerprint: text that meshes of the same ranks in the same arrangement share, on all of these ranks.
    """

    def __init__(
        self, mesh: DeviceMesh, spmd: DeviceMesh | None = None, dp_names: tuple[str, ...] = ()
    ) -> None:
        if mesh.get_coordinate() is None:
            raise ValueError(
                f"rank {dist.get_rank()} is not in {mesh}; only the ranks of a mesh may shard over it"
            )
        self.mesh, self.spmd, self.dp_names = mesh, spmd, dp_names
        axis = mesh.ndim - 1
        self.hybrid, self.shard_size, self.shard_rank = axis == 1, mesh.size(axis), mesh.get_local_rank(axis)
        self.num_replicas = mesh.size() // self.shard_size
        self.fingerprint = hashlib.sha256(repr(mesh.mesh.tolist()).encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        """Whether the two are of the same process groups, not only of the same ranks."""
        if not isinstance(other, DataMesh):
            return NotImplemented
        return (self.groups, self.mesh, self.spmd) == (other.groups, other.mesh, other.spmd)

    def __hash__(self) -> int:
        return hash(self.groups)

    @cached_property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """This rank's process group on each axis."""
        return tuple([self.mesh.get_group(axis) for axis in range(self.mesh.ndim)])

    @cached_property
    def simulated(self) -> bool:
        """Whether no data move (torch's fake process group)."""
        return compat.is_simulated(self.groups[-1])

    @cached_property
    def single_process(self) -> bool:
        """Whether there are no other ranks: one rank, torch's fake process group, or `simulated_ranks`."""
        return self.mesh.size() == 1 or self.simulated or dist.get_backend(self.groups[-1]) == "simulated"

    @property
    def groups_in_use(self) -> tuple[dist.ProcessGroup, ...]:
        """These, and the additional ones: of neighbors, and of separate reductions."""
        result = list(self.groups)
        if self.groups[-1] in _REDUCTIONS:
            result.append(_REDUCTIONS[self.groups[-1]])
        return (*result, *_NEIGHBORS.get(self.groups[-1], {}).values())

    def neighbors(self, count: int | None) -> dist.ProcessGroup | None:
        """A group of `count` consecutive ranks of the shard axis; None: `count` is None, one rank or all.

        Every rank of the shard axis must ask. Makes a process group the first time it is asked for a count.
        """
        if count is None or count in (1, self.shard_size):
            return None
        # Not by the mesh: one that is equal may be left over from process groups that have been destroyed.
        shards = self.groups[-1]
        known = _NEIGHBORS.setdefault(shards, {})
        if count not in known:
            parts = [list(range(first, first + count)) for first in range(0, self.shard_size, count)]
            known[count] = compat.new_part(shards, parts, "neighbors", self.device.type)
        return known[count]

    def reduction_group(self) -> dist.ProcessGroup:
        """A process group of the shard axis's ranks in addition to the mesh's own, the same at each call.

        Every rank of the shard axis must ask. Makes a process group the first time.
        """
        shards = self.groups[-1]
        if shards not in _REDUCTIONS:
            every = [list(range(self.shard_size))]
            _REDUCTIONS[shards] = compat.new_part(shards, every, "reductions", self.device.type)
        return _REDUCTIONS[shards]

    @cached_property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        if self.mesh.device_type == CPU.type:
            return CPU
        return torch.device(self.mesh.device_type, torch.accelerator.current_device_index())


def data_mesh(mesh: DeviceMesh | None, dp_mesh_dims: Any = None) -> DataMesh:
    """The data-parallel mesh that the arguments of `fully_shard` mean.

    Raises ValueError for more than two dimensions, two without names, or names that the mesh does not have.
    """
    if mesh is None:
        if not dist.is_initialized():
            dist.init_process_group()
        mesh = init_device_mesh(compat.default_device_type(), (dist.get_world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh is a {type(mesh).__name__}; expected a torch DeviceMesh (init_device_mesh) or None"
        )
    if dp_mesh_dims is not None:
        return _named_mesh(mesh, dp_mesh_dims)
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}; "
            "pass the sub-mesh of the data-parallel dimensions"
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise WrongCallError(
            f"fully_shard got the 2D mesh {mesh} without names; give init_device_mesh "
            'mesh_dim_names=("replicate", "shard"): HSDP cuts over the last dimension and copies over the first'
        )
    return DataMesh(mesh)


def data_mesh_of(info: Any) -> DataMesh:
    """The data-parallel mesh of torch's FSDPMeshInfo or HSDPMeshInfo; TypeError for anything else.

    Raises ValueError as `data_mesh`, and for other axes than the mesh's last to cut over and its first to copy over.
    """
    mesh = getattr(info, "mesh", None)
    shard, replicate = getattr(info, "shard_mesh_dim", None), getattr(info, "replicate_mesh_dim", None)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh_info is a {type(info).__name__}; expected torch's FSDPMeshInfo or HSDPMeshInfo"
        )
    if (shard, replicate) != (mesh.ndim - 1, None if mesh.ndim == 1 else 0):
        raise ValueError(
            f"mesh_info cuts over axis {shard} of {mesh} and copies over {replicate}; expected the only axis, or the "
            "last of two and the first: pass the sub-mesh of these axes"
        )
    dims = getattr(info, "dp_mesh_dims", None)
    if dims is None:
        return data_mesh(mesh)
    return DataMesh(mesh, info.spmd_mesh, _as_names(dims.shard) + _as_names(dims.replicate))


def _named_mesh(mesh: DeviceMesh, dims: Any) -> DataMesh:
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError(f"dp_mesh_dims names dimensions, but {mesh} has no mesh_dim_names")
    shard, replicate = _as_names(dims.shard), _as_names(dims.replicate)
    if unknown := [name for name in shard + replicate if name not in names]:
        raise ValueError(
            f"dp_mesh_dims names {unknown[0]!r}, which is not among the mesh's dimensions {names}"
        )
    if not shard:
        raise ValueError(
            "dp_mesh_dims has no shard dimension; fully_shard cuts parameters over one (for plain data "
            "parallelism use DistributedDataParallel)"
        )
    axes = [compat.flatten_mesh(mesh, names) for names in (replicate, shard) if names]
    joined = axes[0] if len(axes) == 1 else compat.join_meshes(axes)
    return DataMesh(joined, mesh, shard + replicate)


def _as_names(names: Any) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


@dataclass(frozen=True)
class OtherParallelism:
    """How tensor or expert parallelism had already cut a parameter."""

    mesh: DeviceMesh  # of the unsharded parameter: its mesh without the data-parallel dimensions
    placements: tuple[Any, ...]  # on that mesh
    # shape, stride: of the whole parameter
    shape: torch.Size
    stride: tuple[int, ...]

    @cached_property
    def pieces(self) -> tuple[int, ...]:
        """Elements of the piece of each rank of the mesh."""
        coordinates = itertools.product(*map(range, self.mesh.shape))
        boxes = (held_boxes(self.shape, self.mesh.shape, self.placements, where) for where in coordinates)
        return tuple(sum(math.prod(size) for _, size in own) for own in boxes)


def take_apart(
    name: str, param: torch.Tensor, data: DataMesh
) -> tuple[torch.Tensor, OtherParallelism | None]:
    """A parameter's plain tensor on this rank, and the other parallelism that cut it, if one did.

    Raises ValueError if it is on the data-parallel mesh already, or its placements do not combine with it.
    """
    if not isinstance(param, DISTRIBUTED):
        return param, None
    mesh, placements = param.device_mesh, param.placements
    if data.spmd is not None:
        if mesh != data.spmd:
            raise ValueError(f"{name} is a DTensor on {mesh}, but dp_mesh_dims was given for {data.spmd}")
        dims = mesh.mesh_dim_names or ()
        for dim, placement in zip(dims, placements, strict=True):
            if dim in data.dp_names and not isinstance(placement, Replicate):
                raise ValueError(
                    f"{name} is {placement} on data-parallel dimension {dim!r}; expected Replicate()"
                )
        rest = tuple(dim for dim in dims if dim not in data.dp_names)
        if not rest:
            return param.to_local(), None
        placements = tuple(p for dim, p in zip(dims, placements, strict=True) if dim in rest)
        mesh = mesh[rest if len(rest) > 1 else rest[0]]
    if mesh == data.mesh:
        raise ValueError(
            f"{name} is already a DTensor on the mesh that fully_shard was given, {mesh}; "
            "pass the mesh axis over which data are parallel"
        )
    for placement in placements:
        if type(placement) not in (Shard, Replicate):
            raise ValueError(
                f"{name} is {placement} over {mesh}; fully_shard combines with Shard and Replicate there: "
                "redistribute it first"
            )
    other = OtherParallelism(mesh, placements, param.shape, param.stride())
    if param.numel() and min(other.pieces) == 0:
        raise ValueError(
            f"{name} of shape {tuple(param.shape)}, {placements} over {mesh}, leaves a rank without any of it; pad it, "
            "or cut it over fewer ranks"
        )
    return param.to_local(), other


def check_alike(name: str, other: OtherParallelism, placements: tuple[Any, ...]) -> None:
    """Raise ValueError, on all ranks, unless a parameter in unequal pieces has the same cuts in all of them.

    One all-reduce of 16 bytes for each axis of the other parallelism, where its pieces are not equal.
    """
    if len(set(other.pieces)) == 1 or compat.is_simulated(other.mesh.get_group(0)):
        return
    mark = zlib.crc32(repr(placements).encode())
    both = torch.tensor([mark, -mark], dtype=torch.int64, device=other.mesh.device_type)
    for group in other.mesh.get_all_groups():
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    if both[0] != -both[1]:
        raise ValueError(
            f"{name} of shape {tuple(other.shape)}: {other.placements} over {other.mesh} leaves pieces of different "
            f"sizes, of which each would be cut in another way (here as {placements}). Pad it to a multiple of the "
            "ranks that cut it, or give it a separate unit with a block policy (Whole())"
        )


def place(
    data: DataMesh, ragged: RaggedShard, other: OtherParallelism | None
) -> tuple[DeviceMesh, tuple[Any, ...]]:
    """Mesh and placements of a sharded parameter."""
    if other is None:
        return data.mesh, (Replicate(), ragged) if data.hybrid else (ragged,)
    factor = 1
    for dim, placement in enumerate(other.placements):
        if isinstance(placement, Shard) and placement.dim in ragged.dims:
            factor *= other.mesh.size(dim)
    if factor > 1:
        ragged = StridedRaggedShard(ragged.dims, ragged.local_units, split_factor=factor)
    mesh = compat.join_meshes([data.mesh, other.mesh])
    return mesh, ((Replicate(), ragged) if data.hybrid else (ragged,)) + other.placements
