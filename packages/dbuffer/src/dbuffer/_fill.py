"""Ways in which values get into a shard."""

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import ragged_shard

from . import _torch_compat as compat
from ._geometry import Piece, pieces_of
from ._mesh import raise_together

if TYPE_CHECKING:
    from ._buffer import DBuffer


def load_full(buffer: "DBuffer", tensors: Mapping[str, torch.Tensor]) -> None:
    """See `DBuffer.load_full`."""
    buffer._check_idle("load_full")
    _check_tensors(buffer, tensors)
    with torch.no_grad():
        _cut(buffer._pieces, tensors, buffer.shard)


def load_from_rank(buffer: "DBuffer", tensors: Mapping[str, torch.Tensor] | None, src: int) -> None:
    """See `DBuffer.load_from_rank`."""
    view = buffer.mesh_view
    replica = 0 if view.replicas is None else dist.get_rank(view.replicas)
    is_source = view.rank == src and replica == 0
    raise_together(view, lambda: _check_source(buffer, tensors, src, is_source))
    with torch.no_grad():
        if replica == 0:
            for segment in range(len(buffer.shard)):
                _send_shards(buffer, tensors, segment, src)
        if view.replicas is not None and view.num_replicas > 1:
            source = dist.get_global_rank(view.replicas, 0)
            for shard in buffer.shard:
                dist.broadcast(shard, source, group=view.replicas)


def _check_source(
    buffer: "DBuffer", tensors: Mapping[str, torch.Tensor] | None, src: int, is_source: bool
) -> None:
    buffer._check_idle("load_from_rank")
    if not 0 <= src < buffer.mesh_view.size:
        raise ValueError(
            f"{buffer.name}: src {src} is no rank of a shard dimension of {buffer.mesh_view.size}"
        )
    if is_source:
        if tensors is None:
            raise ValueError(f"{buffer.name}: the source, rank {src} of replica 0, was given no tensors")
        _check_tensors(buffer, tensors)
    elif tensors is not None:
        raise ValueError(f"{buffer.name}: tensors were given beside the source; pass None there")


def _send_shards(
    buffer: "DBuffer", tensors: Mapping[str, torch.Tensor] | None, segment: int, src: int
) -> None:
    """One segment: the source sends every rank its slice."""
    view, shard = buffer.mesh_view, buffer.shard[segment]
    if tensors is None:
        dist.recv(shard, dist.get_global_rank(view.group, src), group=view.group)
        return
    staging = torch.zeros_like(shard)
    for rank in range(view.size):
        pieces = [piece for piece in pieces_of(buffer.layout, rank) if piece.segment == segment]
        target = shard if rank == src else staging.zero_()
        _cut(pieces, tensors, {segment: target})
        if rank != src:
            dist.send(staging, dist.get_global_rank(view.group, rank), group=view.group)


def initialize(
    buffer: "DBuffer", init_fn: Callable[[str, torch.Tensor, torch.Generator], None], seed: int
) -> None:
    """See `DBuffer.initialize`."""
    buffer._check_idle("initialize")
    with torch.no_grad():
        for piece in buffer._pieces:
            if not piece.local_numel:
                continue
            full = torch.empty(piece.shape, dtype=buffer.dtype, device=buffer.device)
            digest = hashlib.sha256(f"{seed}:{piece.name}".encode()).digest()
            generator = torch.Generator(buffer.device).manual_seed(int.from_bytes(digest[:7]))
            init_fn(piece.name, full, generator)
            _cut([piece], {piece.name: full}, buffer.shard)


def load_dtensors(buffer: "DBuffer", tensors: Mapping[str, Any]) -> None:
    """See `DBuffer.from_dtensors`."""
    raise_together(buffer.mesh_view, lambda: _check_dtensors(buffer, tensors))
    with torch.no_grad():
        for piece in buffer._pieces:
            placements = buffer.placements(piece.name)
            moved = ragged_shard.redistribute(tensors[piece.name], placements=placements)
            buffer.local_views[piece.name].copy_(moved.to_local())


def _check_dtensors(buffer: "DBuffer", tensors: Mapping[str, Any]) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, (DTensor, ragged_shard.RaggedDTensor)):
            raise ValueError(
                f"{name}: a {type(tensor).__name__}; expected a distributed tensor (load_full takes plain ones)"
            )
        if tensor.device_mesh != buffer.mesh_view.mesh:
            raise ValueError(
                f"{name}: on mesh {tensor.device_mesh}, the buffer on {buffer.mesh_view.mesh}; move it first"
            )
    _check_shapes(buffer, tensors)


def _check_tensors(buffer: "DBuffer", tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, (DTensor, ragged_shard.RaggedDTensor)):
            raise ValueError(
                f"{name}: a {type(tensor).__name__}; expected a plain full tensor (from_dtensors takes others)"
            )
        if tensor.is_meta:
            raise ValueError(f"{name}: a meta tensor has no values; use initialize")
    _check_shapes(buffer, tensors)


def _check_shapes(buffer: "DBuffer", tensors: Mapping[str, Any]) -> None:
    expected = {piece.name: piece.shape for piece in buffer._pieces}
    if odd := sorted(expected.keys() ^ tensors.keys()):
        which = "is missing" if odd[0] in expected else "is not in the layout"
        raise ValueError(f"{odd[0]} {which}; expected {sorted(expected)}")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"{name}: shape {tuple(tensors[name].shape)}; the layout says {shape}")


def _cut(pieces: Any, tensors: Mapping[str, torch.Tensor], shards: Any) -> None:
    """Write each piece's part of its full tensor where it lies in the slice: one call."""
    targets, sources = [], []
    for piece in pieces:
        if piece.local_numel:
            targets.append(shards[piece.segment].narrow(0, piece.begin, piece.local_numel))
            sources.append(_part(piece, tensors[piece.name]))
    if targets:
        compat.copy(targets, sources)


def _part(piece: Piece, full: torch.Tensor) -> torch.Tensor:
    return full.reshape(-1).narrow(0, piece.first, piece.local_numel)
