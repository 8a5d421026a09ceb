"""Full tensors into layouts, and DTensors of torch's own into ragged ones and back."""

import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from ragged_shard import _comm
from ragged_shard._autograd import FromLocal
from ragged_shard._geometry import axis_parts, shard_box
from ragged_shard._layout import Layout, layout_of
from ragged_shard._ops.operands import local_part
from ragged_shard._tensor import RaggedDTensor


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Any],
    *,
    src_data_rank: int | None = 0,
) -> RaggedDTensor:
    """Lay out a full tensor; every rank calls it with the full tensor's shape and dtype.

    With ``src_data_rank`` an integer, the data is that of the mesh's rank with this coordinate on every axis:
    one all_to_all_single along the ragged axis (the source sends ``T - own`` bytes, the others nothing), then a
    broadcast of the local part along each axis of replicas, after one all-reduce of 24 bytes per axis that
    makes every rank raise if one was given something else. With None each rank takes its part of its own tensor
    and nothing is communicated.

    Args:
        tensor: the full tensor; moved to the mesh's device type. Meta tensors give meta parts (nothing sent).
        device_mesh: a mesh that this rank belongs to.
        placements: one for each mesh axis, one of them ragged.
        src_data_rank: whose data counts, or None.

    Raises:
        ValueError: placements that do not fit, no ragged one, or ranks that disagree.
        TypeError: ``tensor`` is distributed already (`redistribute` it instead).
    """
    layout: Layout | None = None
    problem: Exception | None = None
    try:
        if isinstance(tensor, (DTensor, RaggedDTensor)):
            raise TypeError(
                f"distribute_tensor takes a plain full tensor, got a {type(tensor).__name__}; use redistribute"
            )
        layout = layout_of(device_mesh, tuple(placements), tensor.shape)
        if layout.axis is None:
            raise ValueError(
                f"no ragged placement in {tuple(placements)}: use torch.distributed.tensor.distribute_tensor"
            )
        if src_data_rank is not None and not 0 <= src_data_rank < min(device_mesh.shape):
            raise ValueError(f"src_data_rank={src_data_rank} on a mesh of shape {tuple(device_mesh.shape)}")
    except (TypeError, ValueError, NotImplementedError) as error:
        problem = error
    if src_data_rank is not None and isinstance(device_mesh, DeviceMesh):
        problem = _agreed(device_mesh, (tuple(placements), tuple(tensor.shape), str(tensor.dtype)), problem)
    if problem is not None:
        raise problem
    assert layout is not None
    whole = tensor.detach()
    if not whole.is_meta and whole.device.type != device_mesh.device_type:
        whole = whole.to(device_mesh.device_type)
    if src_data_rank is None or whole.is_meta:
        local = local_part(whole, layout)
    else:
        local = scatter(whole, layout, src_data_rank)
    return RaggedDTensor._wrap(local, layout, tensor.requires_grad)


def _agreed(mesh: DeviceMesh, what: Any, problem: Exception | None) -> Exception | None:
    fingerprint = zlib.crc32(repr(what).encode())
    device = torch.device(mesh.device_type)
    for axis in range(mesh.ndim):
        text = None if problem is None else str(problem)
        found = _comm.agree(text, fingerprint, mesh.get_group(axis), device)
        if found is not None and problem is None:
            problem = ValueError(f"distribute_tensor on {mesh}: {found}")
    return problem


def scatter(whole: torch.Tensor, layout: Layout, source: int) -> torch.Tensor:
    """The parts of the source's tensor on all ranks; ``whole`` is looked at on the source only (its shape
    everywhere).

    Axis after axis: the Shard axes first, since the ragged cut is made inside their parts, the replicas last,
    since the parts are small by then.
    """
    mesh = layout.mesh
    shape = tuple(layout.shape)
    for axis, placement in enumerate(layout.placements):
        if type(placement) is Shard:
            whole = _scatter_shard(whole, layout, axis, shape, source)
            shape = shard_box(
                (placement,), (layout.axis_size(axis),), shape, (layout.coordinate[axis],)
            ).sizes
    assert layout.axis is not None
    ranks, rank = layout.axis_size(layout.axis), layout.coordinate[layout.axis]
    counts = [math.prod(part.shape) for part in axis_parts(shape, layout.ragged, ranks)]
    local = _send_runs(whole.reshape(-1), counts, source, rank, mesh.get_group(layout.axis))
    assert layout.local_shape is not None
    local = local.view(layout.local_shape)
    for axis, placement in enumerate(layout.placements):
        if axis == layout.axis or type(placement) is Shard or layout.axis_size(axis) == 1:
            continue
        local = _comm.broadcast(local.reshape(-1), source, mesh.get_group(axis)).wait().view(local.shape)
        if type(placement) is Partial and placement.reduce_op == "sum" and layout.coordinate[axis] != 0:
            local = torch.zeros_like(local)
    return local


def _scatter_shard(
    whole: torch.Tensor, layout: Layout, axis: int, shape: tuple[int, ...], source: int
) -> torch.Tensor:
    ranks, rank = layout.axis_size(axis), layout.coordinate[axis]
    parts = axis_parts(shape, layout.placements[axis], ranks)
    counts = [math.prod(part.shape) for part in parts]
    if rank == source:
        pieces = [whole[box.slices()].reshape(-1) for part in parts for box in part.boxes]
        whole = torch.cat(pieces) if pieces else whole.new_empty(0)
    group = layout.mesh.get_group(axis)
    return _send_runs(whole.reshape(-1), counts, source, rank, group).view(parts[rank].shape)


def _send_runs(flat: torch.Tensor, counts: list[int], source: int, rank: int, group: Any) -> torch.Tensor:
    """Runs of the source's flat tensor to their ranks: an all_to_all in which only one rank sends."""
    ranks = len(counts)
    if ranks == 1:
        return flat.clone()
    send_counts = counts if rank == source else [0] * ranks
    recv_counts = [counts[rank] if peer == source else 0 for peer in range(ranks)]
    flat = flat if rank == source else flat[:0]
    return _comm.all_to_all(flat.contiguous(), send_counts, recv_counts, group).wait()


def distribute_like(
    tensor: torch.Tensor, like: torch.Tensor, *, src_data_rank: int | None = 0
) -> torch.Tensor:
    """Lay out a full tensor as another one is: as `distribute_tensor` on its mesh with its placements.

    ``like`` may be a RaggedDTensor, a DTensor of torch's own (then the result is one too) or a plain tensor
    (then ``tensor`` itself comes back, on its device). Communicates what `distribute_tensor` does.

    Raises:
        ValueError: the shapes differ, or as `distribute_tensor` does.
    """
    if tensor.shape != like.shape:
        raise ValueError(
            f"distribute_like: a tensor of shape {tuple(tensor.shape)} like one of {tuple(like.shape)}"
        )
    if isinstance(like, RaggedDTensor) and like._layout.axis is not None:
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=src_data_rank)
    if isinstance(like, (DTensor, RaggedDTensor)):
        return torch_distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=src_data_rank)
    return tensor.to(like.device)


def redistribute(
    tensor: torch.Tensor, device_mesh: DeviceMesh | None = None, placements: Sequence[Any] | None = None
) -> RaggedDTensor:
    """`RaggedDTensor.redistribute` for any distributed tensor, DTensors of torch's own included. Differentiable.

    torch's ``DTensor.redistribute`` does not know ragged placements; this does. Communicates and raises as the
    method does.

    Raises:
        TypeError: a plain tensor, or a DTensor that claims a ragged placement (torch made it; its data are not that).
    """
    if isinstance(tensor, RaggedDTensor):
        moved: RaggedDTensor = tensor.redistribute(device_mesh, placements)
        return moved
    if not isinstance(tensor, DTensor):
        raise TypeError("redistribute takes a distributed tensor; use distribute_tensor for a plain one")
    if placements is None:
        raise ValueError("redistribute needs placements, one for each mesh axis")
    if device_mesh is not None and device_mesh != tensor.device_mesh:
        raise ValueError(f"redistribute moves within a mesh: {tensor.device_mesh}, asked for {device_mesh}")
    from ragged_shard._geometry import ragged_axis

    if ragged_axis(tensor.placements) is not None:
        raise TypeError(
            f"a plain DTensor with placements {tensor.placements} was not made by this package, so its local "
            "tensor is not what they say; make it with ragged_shard.distribute_tensor or RaggedDTensor.from_local"
        )
    layout = layout_of(tensor.device_mesh, tensor.placements, tensor.shape)
    local = tensor.to_local().contiguous()
    if local.requires_grad and torch.is_grad_enabled():
        ours = FromLocal.apply(local, RaggedDTensor, layout)
    else:
        ours = RaggedDTensor._wrap(local, layout)
    result: RaggedDTensor = ours.redistribute(placements=placements)
    return result
