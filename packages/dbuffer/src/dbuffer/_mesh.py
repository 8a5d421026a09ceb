"""The part of a device mesh that a buffer uses, and what its ranks agree on."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import _torch_compat as compat


@dataclass(frozen=True)
class MeshView:
    """One or two dimensions of a mesh.

    Attributes:
        mesh: as given.
        shard_dim: the dimension over which buffers are cut.
        group, size, rank: of that dimension, as this rank sees them.
        replicate_dim, replicas: the dimension over which shards are copies, or None; the group of this rank's copies.
        num_replicas: 1 where there is none.
    """

    mesh: DeviceMesh
    shard_dim: int
    group: dist.ProcessGroup
    size: int
    rank: int
    replicate_dim: int | None
    replicas: dist.ProcessGroup | None
    num_replicas: int


def view_mesh(mesh: DeviceMesh, shard_dim: int | str, replicate_dim: int | str | None) -> MeshView:
    """Check which dimensions are meant.

    Raises:
        ValueError: no such dimension, both the same, or the mesh has a further one.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}; expected a torch DeviceMesh (init_device_mesh)")
    shard = _dim(mesh, shard_dim, "shard_dim")
    replicate = None if replicate_dim is None else _dim(mesh, replicate_dim, "replicate_dim")
    used = {shard} if replicate is None else {shard, replicate}
    if shard == replicate or len(used) != mesh.ndim:
        raise ValueError(
            f"the mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names or ''}, shard_dim is {shard_dim!r} "
            f"and replicate_dim {replicate_dim!r}; name each dimension once, "
            "or pass the sub-mesh of the dimensions that are meant"
        )
    return MeshView(
        mesh,
        shard,
        mesh.get_group(shard),
        mesh.size(shard),
        mesh.get_local_rank(shard),
        replicate,
        None if replicate is None else mesh.get_group(replicate),
        1 if replicate is None else mesh.size(replicate),
    )


def _dim(mesh: DeviceMesh, dim: int | str, what: str) -> int:
    names = mesh.mesh_dim_names or ()
    if isinstance(dim, str):
        if dim not in names:
            raise ValueError(f"{what} {dim!r} is not among the mesh's dimensions {names}")
        return names.index(dim)
    if not -mesh.ndim <= dim < mesh.ndim:
        raise ValueError(f"{what} {dim} is out of range for a mesh of {mesh.ndim} dimensions")
    return dim % mesh.ndim


def coordinates(view: MeshView) -> list[tuple[int, int]]:
    """`(replica, shard rank)` in the order of `gather_objects`."""
    return [(replica, rank) for replica in range(view.num_replicas) for rank in range(view.size)]


def gather_digests(view: MeshView, text: str, device: torch.device) -> bool:
    """Whether all ranks gave the same text. One all-gather of 32 bytes, and on a second dimension one of 32 a rank."""
    digest = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8, device=device)
    # Both steps run on every rank, whatever the first shows, so that nobody waits for a rank that has raised.
    for group, size in ((view.group, view.size), (view.replicas, view.num_replicas)):
        if size > 1 and group is not None:
            gathered = digest.new_empty(size * digest.numel())
            compat.all_gather([(gathered, digest)], group).wait()
            digest = gathered
    rows = digest.view(-1, 32).cpu()
    return bool((rows == rows[0]).all())


def gather_objects(view: MeshView, item: Any) -> list[Any]:
    """Every rank's picklable object, replica by replica in rank order. One object all-gather a dimension."""
    items = [item]
    for group, size in ((view.group, view.size), (view.replicas, view.num_replicas)):
        if size > 1 and group is not None:
            parts: list[Any] = [None] * size
            dist.all_gather_object(parts, items, group=group)
            items = [one for part in parts for one in part]
    return items


def raise_together(view: MeshView, action: Callable[[], Any]) -> Any:
    """Do something local; where it raises on some ranks, raise on all. One object all-gather a dimension.

    Raises:
        ValueError: what this rank raised, or, where only others did, the first of their messages.
    """
    problem, result = None, None
    try:
        result = action()
    except Exception as error:
        problem = error
    texts = gather_objects(view, None if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    for place, text in zip(coordinates(view), texts, strict=True):
        if text is not None:
            raise ValueError(f"rank {place[1]} of replica {place[0]} failed: {text}")
    return result
