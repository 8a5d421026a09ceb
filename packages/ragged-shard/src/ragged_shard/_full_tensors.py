"""Full tensors into and out of tensors that are distributed in any way: ragged, DTensors of torch's, or plain.

What state dicts are made of. A check of all tensors comes before any of them is moved, so that all ranks raise together
and none waits for another.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from ragged_shard import _redistribute
from ragged_shard._distribute import scatter
from ragged_shard._ops.operands import local_from_full
from ragged_shard._sharding import Sharding, describe_mesh
from ragged_shard._tensor import DISTRIBUTED, RaggedDTensor
from ragged_shard._torch_compat import TorchStridedShard
from ragged_shard.device import CPU
from ragged_shard.dist import raise_on_all_ranks

Tensors = Mapping[str, torch.Tensor]


def check_mesh_roots(tensors: Tensors, *, loading: bool) -> None:
    """Raise ValueError unless rank 0 is at the first coordinate of every tensor's mesh, as moving to or from it needs.

    Gathering skips meshes that rank 0 is not in; loading needs it in all of them.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, DISTRIBUTED):
            ranks = tensor.device_mesh.mesh.reshape(-1).tolist()
            if ranks[0] != 0 and (loading or 0 in ranks):
                mesh = describe_mesh(tensor.device_mesh)
                raise ValueError(f"{name} is on a {mesh} that does not begin at rank 0; use rank0_only=False")


def check_storage(tensors: Tensors) -> None:
    """Raise ValueError if a tensor is on the meta device."""
    names = [name for name, tensor in tensors.items() if tensor.is_meta]
    if names:
        raise ValueError(
            f"{names} are on the meta device; allocate them first, as in module.to_empty(device='cpu')"
        )


def check_given(name: str, target: torch.Tensor, value: Any) -> None:
    """Raise unless ``value`` is a plain full tensor for ``target``: of its shape, floating point where that is.

    Raises:
        TypeError: not a plain tensor, or floating point for integers (or the reverse).
        ValueError: another shape.
    """
    if not isinstance(value, torch.Tensor) or isinstance(value, DISTRIBUTED):
        raise TypeError(f"{name}: expected a full plain tensor, got {type(value).__name__}")
    if value.shape != target.shape:
        raise ValueError(
            f"{name}: a tensor of shape {tuple(value.shape)} for one of shape {tuple(target.shape)}"
        )
    if value.is_floating_point() != target.is_floating_point():
        raise TypeError(f"{name}: a tensor of {value.dtype} for one of {target.dtype}; cast it first")


def agreed(caller: str, problem: Exception | None, answer: Any, *, from_rank0: bool) -> Any:
    """Returns rank 0's ``answer``; raises on every rank if any rank passes a ``problem``.

    Communicates only if ``from_rank0``: an all-gather and a broadcast of pickled objects over all ranks.
    """
    if from_rank0:
        raise_on_all_ranks(problem, caller)
        shared: list[Any] = [answer]
        dist.broadcast_object_list(shared, src=0)
        return shared[0]
    if problem is not None:
        raise_on_all_ranks(problem, caller, groups=())
    return answer


def load_tensor(target: torch.Tensor, full: torch.Tensor | None, *, from_rank0: bool) -> None:
    """Copy a full tensor into ``target`` in place, cast to its dtype; on other ranks than 0 ``full`` may be None.

    With ``from_rank0`` it is scattered from rank 0, and broadcast along axes of replicas and for a plain target; else
    every rank copies its own range, and nothing is communicated.
    """
    device, dtype = target.device, target.dtype
    if full is not None:
        full = full.detach().to(device=device, dtype=dtype)
    elif isinstance(target, DISTRIBUTED):
        # Receiving ranks are asked for shape and dtype only: one element, expanded, takes no memory.
        full = torch.empty((), device=device, dtype=dtype).expand(target.shape)
    if isinstance(target, RaggedDTensor) and target._sharding.axis is not None:
        assert full is not None
        sharding = target._sharding
        local = scatter(full, sharding, 0) if from_rank0 else local_from_full(full, sharding)
        target._local_tensor.copy_(local)
    elif isinstance(target, DISTRIBUTED):
        assert full is not None
        if from_rank0 and _has_unequal_shares(target):  # which torch cannot scatter
            full, from_rank0 = _broadcast(full.contiguous()), False
        placed = torch_distribute_tensor(
            full.contiguous(), target.device_mesh, target.placements, src_data_rank=0 if from_rank0 else None
        )
        target.to_local().copy_(placed.to_local())
    else:
        if from_rank0:
            full = _broadcast((target.detach().clone() if full is None else full).contiguous())
        assert full is not None
        target.detach().copy_(full)


def _has_unequal_shares(target: Any) -> bool:
    """Whether several mesh axes cut one dimension of a DTensor of torch's into shares of different sizes."""
    cuts: dict[int, int] = {}
    for axis, placement in enumerate(target.placements):
        if isinstance(placement, (Shard, TorchStridedShard)):
            cuts[placement.dim] = cuts.get(placement.dim, 1) * target.device_mesh.size(axis)
    strided = [placement.dim for placement in target.placements if type(placement) is TorchStridedShard]
    return any(target.shape[dim] % cuts[dim] for dim in strided)


def _broadcast(tensor: torch.Tensor) -> torch.Tensor:
    """Rank 0's tensor on every rank; through the accelerator if the process group does not move CPU tensors."""
    if tensor.is_cpu and f"{CPU.type}:" not in dist.get_backend_config():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None  # the group's backend is one of an accelerator
        return _broadcast(tensor.to(accelerator)).to(tensor.device)
    dist.broadcast(tensor.view(-1).view(torch.uint8), src=0)  # backends move few dtypes
    return tensor


def gather_tensor(value: torch.Tensor, *, rank0_only: bool) -> torch.Tensor:
    """The full tensor as a plain one with its own storage; with ``rank0_only`` its values count on rank 0 alone."""
    if isinstance(value, RaggedDTensor):
        sharding = value._sharding
        if rank0_only and sharding.axis is not None and not sharding.partial:
            first = _to_first(value._local_tensor, sharding)
            if sharding.cut_axes == (sharding.axis,):
                return first
            rest = sharding.replace(sharding.axis, Replicate())
            return RaggedDTensor._wrap(first, rest).full_tensor()
        return value.full_tensor()
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    return value.detach().clone()


def _to_first(local: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """Gather to the first rank of the ragged axis; other ranks get a tensor of that shape without its values."""
    axis = sharding.axis
    assert axis is not None
    dims, _, *factor = sharding.ragged._key()
    one_hot = [int(rank == 0) for rank in range(sharding.axis_size(axis))]
    target = sharding.replace(axis, type(sharding.ragged)(dims, one_hot, *factor))
    base = sharding.replace(axis, Replicate()).local_shape
    assert base is not None
    moved = _redistribute.start(local, sharding, target).wait()
    if sharding.coordinate[axis] > 0:
        return moved.new_zeros(()).expand(base).contiguous()
    if moved is local:  # a copy, which is plain where local tensors are codes
        return local.new_empty(base).copy_(local.view(base))
    return moved.view(base)
