"""A sharding: mesh, placements and shape together, and this rank's part. Interned."""

import math
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from ragged_shard import _geometry as geo
from ragged_shard._placement import RaggedShard, without_carried
from ragged_shard._torch_compat import Spec, make_spec

_CACHE: "OrderedDict[tuple[Any, ...], Sharding]" = OrderedDict()
_CACHE_SIZE = 16384
# Meshes whose axis was looked at.
_IN_ORDER: "weakref.WeakValueDictionary[tuple[int, int], DeviceMesh]" = weakref.WeakValueDictionary()


class Sharding:
    """How a tensor of one shape is spread over one mesh, and this rank's part of it.

    Made by `sharding_of`, which returns the same object for equal arguments: comparing is mostly an identity test.
    """

    def __init__(self, mesh: DeviceMesh, placements: geo.Placements, shape: torch.Size) -> None:
        mesh_shape = tuple(mesh.shape)
        self.axis = geo.ragged_axis(placements)  # the ragged mesh axis, or None
        geo.validate(placements, self.axis, mesh_shape, tuple(shape))
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"this rank is not in {mesh}: only the ranks of a mesh can hold tensors on it")
        if self.axis is not None and _IN_ORDER.get((id(mesh), self.axis)) is not mesh:
            ranks = mesh.mesh.tolist()
            if mesh.ndim > 1 or ranks != sorted(ranks):
                _require_order(mesh, self.axis)
            _IN_ORDER[id(mesh), self.axis] = mesh
        self.mesh = mesh
        self.placements = placements
        self.shape = shape
        self.stride = contiguous_stride(shape)
        self.coordinate = tuple(coordinate)
        self.cut_axes = tuple([axis for axis, p in enumerate(placements) if isinstance(p, Shard)])
        self.partial = any([isinstance(p, Partial) for p in placements])  # noqa: C419  # a list is faster
        self.replicate = all([isinstance(p, Replicate) for p in placements])  # noqa: C419
        self.ordinary = self.axis is not None and not self.partial  # whether the fast paths of ops accept it
        self.region: geo.Region | None = None
        self.local_shape: torch.Size | None = None  # None: a placement of torch's that is not known here
        if all([type(p) in geo.TORCHS or isinstance(p, RaggedShard) for p in placements]):  # noqa: C419
            self.region = geo.region(placements, self.axis, mesh_shape, tuple(shape), self.coordinate)
            self.local_shape = torch.Size(self.region.local_shape)
        self._specs: dict[torch.dtype, Spec] = {}

    def spec(self, dtype: torch.dtype) -> Spec:
        """The DTensorSpec of a tensor of this sharding and dtype (cached)."""
        spec = self._specs.get(dtype)
        if spec is None:
            ragged = self.axis is not None
            spec = make_spec(self.mesh, self.placements, self.shape, self.stride, dtype, ragged=ragged)
            self._specs[dtype] = spec
        return spec

    def axis_size(self, axis: int) -> int:
        """Ranks along a mesh axis."""
        return int(self.mesh.shape[axis])

    @property
    def cut_groups(self) -> list[dist.ProcessGroup]:
        """The process groups of the mesh axes that cut the tensor, axis by axis."""
        return [self.mesh.get_group(axis) for axis in self.cut_axes if self.axis_size(axis) > 1]

    def replicated(self, shape: Sequence[int]) -> "Sharding":
        """The sharding of a tensor of this shape of which every rank of the mesh has a copy."""
        return sharding_of(self.mesh, (Replicate(),) * self.mesh.ndim, torch.Size(shape))

    @property
    def ragged(self) -> RaggedShard:
        """The ragged placement."""
        assert self.axis is not None
        placement = self.placements[self.axis]
        assert isinstance(placement, RaggedShard)
        return placement

    def with_placements(self, placements: Iterable[Placement]) -> "Sharding":
        """The sharding of the same shape with other placements on the same mesh."""
        return sharding_of(self.mesh, placements, self.shape)

    def replace(self, axis: int, placement: Placement) -> "Sharding":
        """The sharding of the same shape with another placement on one mesh axis."""
        return self.with_placements((*self.placements[:axis], placement, *self.placements[axis + 1 :]))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Sharding):
            return NotImplemented
        return self.shape == other.shape and self.placements == other.placements and self.mesh == other.mesh

    def __hash__(self) -> int:
        return hash((self.shape, self.placements))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Sharding":
        return self

    def __repr__(self) -> str:
        return f"shape {tuple(self.shape)} as {self.placements} on {describe_mesh(self.mesh)}"


def _require_order(mesh: DeviceMesh, axis: int) -> None:
    """Refuse, on every rank, a mesh axis whose ranks are not in the order of their process group.

    `new_group` sorts ranks, collectives go by the group's order, and places in a tensor by the mesh's.
    """
    group = dist.get_process_group_ranks(mesh.get_group(axis))
    ranks = mesh.mesh.tolist()  # and no op of torch's: a compiler may be tracing
    for _ in range(mesh.ndim - 1):
        ranks = [rank for line in ranks for rank in line]
    stride, span = math.prod(mesh.shape[axis + 1 :]), math.prod(mesh.shape[axis:])
    starts = [start for start in range(len(ranks)) if start % span < stride]
    lines = [ranks[start : start + span : stride] for start in starts]
    if group == sorted(group):
        wrong = next((line for line in lines if line != sorted(line)), None)
    else:  # made with sort_ranks=False, and the mesh from it
        wrong = next((line for line in lines if set(line) == set(group) and line != group), None)
    if wrong is not None:
        raise ValueError(
            f"ranks {wrong} of {describe_mesh(mesh)} are not in the order of their process group, {sorted(wrong)}; "
            "expected a mesh with ascending ranks along each axis that tensors are sharded on"
        )


def describe_mesh(mesh: DeviceMesh) -> str:
    """A short description of a mesh, for error messages."""
    names = f", {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
    return f"mesh({mesh.device_type} {tuple(mesh.shape)}{names})"


def ranks_along(mesh: DeviceMesh, axes: Sequence[int]) -> frozenset[int]:
    """The global ranks of this one's group along some axes of a mesh; itself alone where there are none."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    place = tuple([slice(None) if axis in axes else at for axis, at in enumerate(coordinate)])
    return frozenset(mesh.mesh[place].flatten().tolist())


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides as torch computes them (a dimension of size 0 counts as 1)."""
    stride, running = [], 1
    for size in reversed(shape):
        stride.append(running)
        running *= max(size, 1)
    return tuple(reversed(stride))


def check_stride(shape: Sequence[int], stride: Sequence[int], what: str) -> None:
    """Raises unless a tensor of this shape and stride is row-major contiguous."""
    wanted = contiguous_stride(shape)
    if len(stride) != len(wanted):
        raise ValueError(f"{what}: stride {tuple(stride)} for a {len(wanted)}-d shape {tuple(shape)}")
    if math.prod(shape) and any(s != w for n, s, w in zip(shape, stride, wanted, strict=True) if n > 1):
        raise ValueError(
            f"{what}: stride {tuple(stride)} is not contiguous for shape {tuple(shape)} (expected {wanted}); "
            "make the tensor contiguous first"
        )


def sharding_of(mesh: DeviceMesh, placements: Iterable[Placement], shape: Sequence[int]) -> Sharding:
    """The sharding of these three, validated once and interned.

    Meshes are compared by identity (an entry keeps its mesh alive, so ids are not reused): after process groups were
    destroyed and created again, an equal mesh must not lead to the destroyed ones.
    """
    placements = placements if type(placements) is tuple else tuple(placements)
    key = (id(mesh), placements, shape)
    try:
        sharding = _CACHE.get(key)
    except NotImplementedError:  # from a tensor on the meta device
        return sharding_of(mesh, without_carried(placements), shape)
    if sharding is None:
        size = torch.Size(shape)
        sharding = Sharding(mesh, geo.normalize(placements, len(size)), size)
        _CACHE[(id(mesh), placements, size)] = sharding
        if sharding.placements != placements:
            _CACHE[(id(mesh), sharding.placements, size)] = sharding
        while len(_CACHE) > _CACHE_SIZE:
            _CACHE.popitem(last=False)
    return sharding
