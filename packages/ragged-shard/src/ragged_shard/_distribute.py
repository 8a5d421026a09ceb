"""Makes ragged tensors from full tensors and from torch's DTensors."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from ragged_shard import _comm, _redistribute
from ragged_shard._autograd import FromLocal
from ragged_shard._geometry import axis_extents
from ragged_shard._ops.operands import local_from_full
from ragged_shard._placement import RaggedShard
from ragged_shard._sharding import Sharding, sharding_of
from ragged_shard._tensor import RaggedDTensor, agree
from ragged_shard.dist import DISTRIBUTED


def distribute_tensor(
    tensor: Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement], *, src_data_rank: int | None = 0
) -> RaggedDTensor:
    """Distribute a full tensor over a mesh. Every rank passes a tensor of the full shape and dtype.

    With an integer ``src_data_rank`` the data comes from the rank with this coordinate on every mesh axis: one
    all_to_all_single along the ragged axis (the source sends ``T - own`` bytes, the others nothing), then one broadcast
    of the local tensor along each axis of replicas. Before that, one all-reduce of 64 bytes per axis makes every rank
    raise if the ranks' arguments differ. With None each rank copies its range out of its tensor, and nothing is
    communicated.

    Args:
        tensor: the full tensor; moved to the mesh's device type. A meta tensor gives a meta tensor (nothing is sent).
        device_mesh: a mesh that this rank belongs to.
        placements: one for each mesh axis, one of them ragged.
        src_data_rank: the rank whose data is distributed, or None.

    Raises:
        ValueError: placements that do not fit, no ragged one, or ranks that disagree.
        TypeError: ``tensor`` is already distributed (`redistribute` it instead).
    """
    sharding: Sharding | None = None
    problem: Exception | None = None
    try:
        if isinstance(tensor, DISTRIBUTED):
            raise TypeError(
                f"distribute_tensor takes a plain full tensor, got a {type(tensor).__name__}; use redistribute"
            )
        sharding = sharding_of(device_mesh, tuple(placements), tensor.shape)
        if sharding.axis is None:
            raise ValueError(
                f"no ragged placement in {tuple(placements)}: use torch.distributed.tensor.distribute_tensor"
            )
        if src_data_rank is not None and not 0 <= src_data_rank < min(device_mesh.shape):
            raise ValueError(f"src_data_rank={src_data_rank} on a mesh of shape {tuple(device_mesh.shape)}")
    except (TypeError, ValueError, NotImplementedError) as error:
        problem = error
    compared = None if src_data_rank is None else device_mesh
    agree(problem, "distribute_tensor", compared, placements, tensor.shape, tensor)
    assert sharding is not None
    full = tensor.detach()
    if not full.is_meta and full.device.type != device_mesh.device_type:
        full = full.to(device_mesh.device_type)
    if src_data_rank is None or full.is_meta:
        local = local_from_full(full, sharding)
    else:
        local = scatter(full, sharding, src_data_rank)
    return RaggedDTensor._wrap(local, sharding, tensor.requires_grad)


def scatter(full: Tensor, sharding: Sharding, source: int) -> Tensor:
    """This rank's local tensor of the source's full one. On other ranks only the shape and dtype of ``full`` matter.

    Axis by axis: the Shard axes first, since the ragged cut is made inside their slices; the axes of replicas last,
    since few bytes are sent by then.
    """
    mesh, shape = sharding.mesh, tuple(sharding.shape)
    for axis, placement in enumerate(sharding.placements):
        if type(placement) is Shard:
            full = _scatter_axis(full, shape, sharding, axis, source)
            shape = tuple(full.shape)
    assert sharding.axis is not None
    local = _scatter_axis(full, shape, sharding, sharding.axis, source)
    for axis, placement in enumerate(sharding.placements):
        if axis == sharding.axis or type(placement) is Shard or sharding.axis_size(axis) == 1:
            continue
        local = _comm.broadcast(local.reshape(-1), source, mesh.get_group(axis)).wait().view(local.shape)
        if type(placement) is Partial and placement.reduce_op == "sum" and sharding.coordinate[axis] != 0:
            local = torch.zeros_like(local)
    return local


def _scatter_axis(full: Tensor, shape: tuple[int, ...], sharding: Sharding, axis: int, source: int) -> Tensor:
    """This rank's part, along one mesh axis, of a tensor that the axis' rank ``source`` has."""
    ranks, rank = sharding.axis_size(axis), sharding.coordinate[axis]
    at_source = RaggedShard((), [int(other == source) for other in range(ranks)])
    parts = axis_extents(shape, at_source, ranks)
    wanted = axis_extents(shape, sharding.placements[axis], ranks)
    held = full if rank == source else full.new_empty(0)
    group = sharding.mesh.get_group(axis)
    return _redistribute.all_to_all(held, shape, parts, wanted, rank, group).wait().view(wanted[rank].shape)


def distribute_like(tensor: Tensor, like: Tensor, *, src_data_rank: int | None = 0) -> Tensor:
    """Distribute a full tensor as another tensor is: on its mesh, with its placements.

    ``like`` may be a RaggedDTensor, a DTensor of torch's (then the result is one too) or a plain tensor (then the
    result is ``tensor`` itself, on the device of ``like``). Communicates as `distribute_tensor` does.

    Raises:
        ValueError: the shapes differ, or as `distribute_tensor` does.
    """
    if tensor.shape != like.shape:
        raise ValueError(f"distribute_like: shape {tuple(tensor.shape)} like one of {tuple(like.shape)}")
    if isinstance(like, RaggedDTensor) and like._sharding.axis is not None:
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=src_data_rank)
    if isinstance(like, DISTRIBUTED):
        return torch_distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=src_data_rank)
    return tensor.to(like.device)


def redistribute(
    tensor: Tensor, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
) -> RaggedDTensor:
    """`RaggedDTensor.redistribute` for any distributed tensor, including DTensors of torch's. Differentiable.

    The ``redistribute`` of a DTensor of torch's refuses ragged placements. Communicates and raises as the method does.

    Raises:
        TypeError: a plain tensor.
    """
    if isinstance(tensor, RaggedDTensor):
        moved: RaggedDTensor = tensor.redistribute(device_mesh, placements)
        return moved
    if not isinstance(tensor, DTensor):
        raise TypeError("redistribute takes a distributed tensor; use distribute_tensor for a plain one")
    sharding = sharding_of(tensor.device_mesh, tensor.placements, tensor.shape)
    local = tensor.to_local().contiguous()
    if local.requires_grad and torch.is_grad_enabled():
        ours = FromLocal.apply(local, RaggedDTensor, sharding)
    else:
        ours = RaggedDTensor._wrap(local, sharding)
    result: RaggedDTensor = ours.redistribute(device_mesh, placements)
    return result
