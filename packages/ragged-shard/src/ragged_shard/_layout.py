"""A layout: mesh, placements and shape together, and what follows from them on this rank. Interned, so cheap."""

import math
from collections import OrderedDict
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from ragged_shard import _geometry as geo
from ragged_shard._placement import RaggedShard
from ragged_shard._torch_compat import Spec, make_spec

_CACHE: "OrderedDict[tuple[Any, ...], Layout]" = OrderedDict()
_CACHE_SIZE = 16384


class Layout:
    """Where a tensor of one shape lies on one mesh, and this rank's part of it.

    Made by `layout_of`, which hands out one object for equal arguments: comparing layouts is mostly an identity test.
    """

    __slots__ = (
        "_specs",
        "axis",
        "coordinate",
        "cut_axes",
        "local_shape",
        "mesh",
        "ordinary",
        "partial",
        "placements",
        "region",
        "replicate",
        "shape",
        "stride",
    )

    def __init__(self, mesh: DeviceMesh, placements: geo.Placements, shape: torch.Size) -> None:
        mesh_shape = tuple(mesh.shape)
        geo.validate(placements, mesh_shape, tuple(shape))
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(
                f"this rank is not in {mesh}: only ranks of a mesh can hold a part of a tensor on it"
            )
        self.mesh = mesh
        self.placements = placements
        self.shape = shape
        self.stride = contiguous_stride(shape)
        self.coordinate = tuple(coordinate)
        self.axis = geo.ragged_axis(placements)  # the ragged mesh axis, or None
        self.cut_axes = tuple(a for a, p in enumerate(placements) if isinstance(p, (RaggedShard, Shard)))
        self.partial = any(isinstance(p, Partial) for p in placements)
        self.replicate = all(isinstance(p, Replicate) for p in placements)
        self.ordinary = self.axis is not None and not self.partial  # what the ops' fast paths take
        self.region: geo.Region | None = None
        self.local_shape: torch.Size | None = None  # None: torch's own layouts that are not ours to know
        if all(type(p) in (Shard, Replicate, Partial) or isinstance(p, RaggedShard) for p in placements):
            self.region = geo.region(placements, mesh_shape, tuple(shape), self.coordinate)
            self.local_shape = torch.Size(self.region.local_shape)
        self._specs: dict[torch.dtype, Spec] = {}

    def spec(self, dtype: torch.dtype) -> Spec:
        """The DTensorSpec of a tensor of this layout and dtype (cached)."""
        found = self._specs.get(dtype)
        if found is None:
            found = make_spec(self.mesh, self.placements, self.shape, self.stride, dtype)
            self._specs[dtype] = found
        return found

    def axis_size(self, axis: int) -> int:
        """Ranks along a mesh axis."""
        return int(self.mesh.shape[axis])

    @property
    def ragged(self) -> Any:
        """The ragged placement."""
        assert self.axis is not None
        return self.placements[self.axis]

    def with_placements(self, placements: Any) -> "Layout":
        """The same tensor, laid out in another way on the same mesh."""
        return layout_of(self.mesh, placements, self.shape)

    def replace(self, axis: int, placement: Any) -> "Layout":
        """The same tensor with another placement on one mesh axis."""
        return self.with_placements((*self.placements[:axis], placement, *self.placements[axis + 1 :]))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout):
            return NotImplemented
        return self.shape == other.shape and self.placements == other.placements and self.mesh == other.mesh

    def __hash__(self) -> int:
        return hash((self.shape, self.placements))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Layout":
        return self

    def __repr__(self) -> str:
        return f"shape {tuple(self.shape)} as {self.placements} on {describe_mesh(self.mesh)}"


def describe_mesh(mesh: DeviceMesh) -> str:
    """A mesh in a few words, for error messages."""
    names = f", {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
    return f"mesh({mesh.device_type} {tuple(mesh.shape)}{names})"


def contiguous_stride(shape: Any) -> tuple[int, ...]:
    """Row-major strides, as torch counts them (a dimension of size 0 counts as 1)."""
    stride, running = [], 1
    for size in reversed(shape):
        stride.append(running)
        running *= max(size, 1)
    return tuple(reversed(stride))


def check_stride(shape: Any, stride: Any, what: str) -> None:
    """Raise unless a tensor of this shape and stride is row-major contiguous, as a run of elements must be."""
    wanted = contiguous_stride(shape)
    if len(stride) != len(wanted):
        raise ValueError(f"{what}: stride {tuple(stride)} for a {len(wanted)}-d shape {tuple(shape)}")
    if math.prod(shape) and any(s != w for n, s, w in zip(shape, stride, wanted, strict=True) if n > 1):
        raise ValueError(
            f"{what}: stride {tuple(stride)} is not contiguous for shape {tuple(shape)} (expected {wanted}); "
            "make the tensor contiguous first"
        )


def layout_of(mesh: DeviceMesh, placements: Any, shape: Any) -> Layout:
    """The layout of these three, validated once and interned.

    The mesh counts by identity (the entry keeps it alive, so its id is not reused): after a process group is
    destroyed and made anew an equal mesh must not lead to the dead one's groups.
    """
    placements = placements if type(placements) is tuple else tuple(placements)
    key = (id(mesh), placements, shape)
    found = _CACHE.get(key)
    if found is None:
        size = torch.Size(shape)
        found = Layout(mesh, geo.normalize(placements, len(size)), size)
        _CACHE[(id(mesh), found.placements, size)] = found
        _CACHE[(id(mesh), placements, size)] = found
        while len(_CACHE) > _CACHE_SIZE:
            _CACHE.popitem(last=False)
    return found
