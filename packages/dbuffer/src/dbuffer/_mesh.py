"""The axes of a device mesh that a buffer uses."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class MeshView:
    """One or two axes of a mesh."""

    mesh: DeviceMesh  # as given
    shard_axis: int  # the axis over which buffers are cut
    # group, size, rank: of that axis, as this rank sees them
    group: dist.ProcessGroup
    size: int
    rank: int
    # this rank's group of the axis over which shards are copies, or None
    replica_group: dist.ProcessGroup | None
    num_replicas: int  # 1 where there is none

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups of both axes."""
        return [self.group] if self.replica_group is None else [self.group, self.replica_group]


def view_mesh(mesh: DeviceMesh, shard_dim: int | str, replicate_dim: int | str | None) -> MeshView:
    """Check which axes are meant.

    Raises:
        TypeError: not a mesh.
        ValueError: no such axis, both the same, or the mesh has a further one.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}; expected a torch DeviceMesh (init_device_mesh)")
    shard = _axis(mesh, shard_dim, "shard_dim")
    replicate = None if replicate_dim is None else _axis(mesh, replicate_dim, "replicate_dim")
    used = {shard} if replicate is None else {shard, replicate}
    if shard == replicate or len(used) != mesh.ndim:
        raise ValueError(
            f"the mesh has {mesh.ndim} axes {mesh.mesh_dim_names or ''}, shard_dim is {shard_dim!r} "
            f"and replicate_dim {replicate_dim!r}; name each axis once, or pass the sub-mesh of the axes that are meant"
        )
    return MeshView(
        mesh,
        shard,
        mesh.get_group(shard),
        mesh.size(shard),
        mesh.get_local_rank(shard),
        None if replicate is None else mesh.get_group(replicate),
        1 if replicate is None else mesh.size(replicate),
    )


def _axis(mesh: DeviceMesh, chosen: int | str, what: str) -> int:
    names = mesh.mesh_dim_names or ()
    if isinstance(chosen, str):
        if chosen not in names:
            raise ValueError(f"{what} {chosen!r} is not among the mesh's axes {names}")
        return names.index(chosen)
    if not -mesh.ndim <= chosen < mesh.ndim:
        raise ValueError(f"{what} {chosen} is out of range for a mesh of {mesh.ndim} axes")
    return chosen % mesh.ndim
