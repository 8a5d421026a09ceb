"""Full state dicts: whole, plain tensors on one rank or on all, into and out of modules whose parameters are
distributed.

torch's own helper (`set_model_state_dict` with ``full_state_dict=True``) slices by torch's placements, which
are not these; for parameters still on the meta device it would go wrong without a word. Here a meta parameter
raises.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from ragged_shard import _comm
from ragged_shard._distribute import scatter
from ragged_shard._geometry import axis_extents, shard_box
from ragged_shard._ops.operands import local_from_full
from ragged_shard._sharding import Sharding, describe_mesh
from ragged_shard._tensor import RaggedDTensor


def load_full_state_dict(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    *,
    rank0_only: bool = False,
    strict: bool = True,
) -> None:
    """Load whole tensors into a module's parameters and buffers, ragged, DTensor or plain, in place.

    With ``rank0_only`` the state dict counts on global rank 0 alone (others pass anything, ``{}`` say): each
    tensor is scattered from there, so that no other rank ever holds a whole one; it must then be on the
    module's meshes at their first coordinate. Otherwise every rank has it and takes its own parts without
    communication. A check comes first, on all ranks alike: nothing is written, and no rank waits for another,
    if a name or shape is wrong.

    Values that are not tensors (extra state) are not supported.

    Args:
        module: its parameters must have storage: call ``to_empty`` first if they are on the meta device.
        state_dict: name -> whole tensor; dtypes are cast to the module's.
        rank0_only: only global rank 0 has the state dict.
        strict: names must be exactly the module's; else those that both have are loaded.

    Raises:
        ValueError: a meta parameter, a mesh that does not begin at rank 0 (``rank0_only``), a wrong shape,
        missing or unexpected names (strict); on every rank.
        TypeError: a value that is no plain tensor.
    """
    own = module.state_dict(keep_vars=True)
    given: dict[str, tuple[int, ...]] | None = None
    problem = None
    if not rank0_only or dist.get_rank() == 0:
        problem, given = _look(own, state_dict, strict)
    problem = problem or _meta(own) or (_off_root(own, True) if rank0_only else None)
    if rank0_only:
        shared: list[Any] = [(problem, sorted(given or ()))]
        dist.broadcast_object_list(shared, src=0)
        first, names = shared[0]
        problems: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        problem = next((p for p in (first, *problems) if p is not None), None)
    else:
        names = sorted(given or ())
    if problem is not None:
        kind, text = problem
        raise {"TypeError": TypeError, "ValueError": ValueError}[kind](f"load_full_state_dict: {text}")
    with torch.no_grad():
        for name in names:
            _load(own[name], state_dict.get(name), rank0_only)


def _look(
    own: Mapping[str, Any], given: Mapping[str, Any], strict: bool
) -> tuple[tuple[str, str] | None, dict[str, tuple[int, ...]]]:
    """What is wrong with a state dict for this module, and the shapes of what will be loaded."""
    missing, unexpected = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    if strict and (missing or unexpected):
        return ("ValueError", f"missing names {missing}, unexpected names {unexpected}"), {}
    shapes = {}
    for name in own.keys() & given.keys():
        value = given[name]
        if not isinstance(value, torch.Tensor) or isinstance(value, (DTensor, RaggedDTensor)):
            return ("TypeError", f"{name}: expected a whole plain tensor, got {type(value).__name__}"), {}
        if tuple(value.shape) != tuple(own[name].shape):
            found, wanted = tuple(value.shape), tuple(own[name].shape)
            return ("ValueError", f"{name}: a tensor of shape {found} for one of shape {wanted}"), {}
        shapes[name] = tuple(value.shape)
    return None, shapes


def _meta(own: Mapping[str, Any]) -> tuple[str, str] | None:
    names = [name for name, value in own.items() if isinstance(value, torch.Tensor) and value.is_meta]
    if not names:
        return None
    hint = "give them storage first, as in module.to_empty(device='cpu')"
    return "ValueError", f"{names} are on the meta device; {hint}"


def _off_root(own: Mapping[str, Any], loading: bool) -> tuple[str, str] | None:
    """Whether some tensor's mesh has another rank where rank 0 is taken to be: at its first coordinate.

    Loading needs rank 0 in every mesh; gathering does without in meshes that rank 0 is not in.
    """
    for name, value in own.items():
        if isinstance(value, (DTensor, RaggedDTensor)):
            ranks = value.device_mesh.mesh.reshape(-1).tolist()
            if ranks[0] != 0 and (loading or 0 in ranks):
                mesh = describe_mesh(value.device_mesh)
                return (
                    "ValueError",
                    f"{name} is on a {mesh} that does not begin at rank 0; use rank0_only=False",
                )
    return None


def _load(target: torch.Tensor, whole: torch.Tensor | None, rank0_only: bool) -> None:
    """One tensor, into place."""
    device, dtype = target.device, target.dtype
    if whole is not None:
        whole = whole.detach().to(device=device, dtype=dtype)
    elif isinstance(target, (DTensor, RaggedDTensor)):
        # Shape and dtype are all that a receiving rank is asked for: one element, expanded, costs nothing.
        whole = torch.empty((), device=device, dtype=dtype).expand(target.shape)
    if isinstance(target, RaggedDTensor) and target._sharding.axis is not None:
        assert whole is not None
        sharding = target._sharding
        part = scatter(whole, sharding, 0) if rank0_only else local_from_full(whole, sharding)
        target._local_tensor.copy_(part)
    elif isinstance(target, (DTensor, RaggedDTensor)):
        assert whole is not None
        source = 0 if rank0_only else None
        placed = torch_distribute_tensor(
            whole.contiguous(), target.device_mesh, target.placements, src_data_rank=source
        )
        target.to_local().copy_(placed.to_local())
    else:
        if rank0_only:
            whole = _broadcast(target.detach().clone() if whole is None else whole.contiguous())
        assert whole is not None
        target.detach().copy_(whole)


def _broadcast(tensor: torch.Tensor) -> torch.Tensor:
    """Rank 0's tensor, on every rank; by way of the GPU where the process group moves nothing else."""
    if dist.get_backend() == "nccl" and not tensor.is_cuda:
        return _broadcast(tensor.cuda()).to(tensor.device)
    dist.broadcast(tensor, src=0)
    return tensor


def full_state_dict(
    module: nn.Module, *, rank0_only: bool = False, cpu_offload: bool = False
) -> dict[str, torch.Tensor]:
    """A module's parameters and buffers as whole, plain tensors that share no storage with it.

    One tensor at a time. On all ranks, each costs what Ragged -> Replicate costs; with ``rank0_only`` the parts
    go to the first rank of each ragged axis alone (its own bytes from every other rank, one all_to_all_single)
    and other ranks get ``{}``.

    Raises:
        ValueError: a parameter on the meta device; with ``rank0_only``, one on a mesh that does not begin at rank 0.
        TypeError: an entry of the module's state dict that is no tensor.
    """
    own = module.state_dict(keep_vars=True)
    problem = _meta(own) or (_off_root(own, False) if rank0_only else None)
    if problem is not None:
        raise ValueError(f"full_state_dict: {problem[1]}")
    gathered = {}
    keep = not rank0_only or dist.get_rank() == 0
    for name, value in own.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"full_state_dict: {name} is a {type(value).__name__}, not a tensor")
        with torch.no_grad():
            whole = _whole(value, rank0_only)
        if keep:
            gathered[name] = whole.cpu() if cpu_offload else whole
    return gathered


def _whole(value: torch.Tensor, rank0_only: bool) -> torch.Tensor:
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
    """Ragged -> whole on the first rank of the ragged axis.

    Other ranks get a tensor of that shape without its values.
    """
    axis = sharding.axis
    assert axis is not None
    neutral = sharding.replace(axis, Replicate())
    base = shard_box(
        neutral.placements, tuple(sharding.mesh.shape), tuple(sharding.shape), sharding.coordinate
    ).sizes
    ranks, rank = sharding.axis_size(axis), sharding.coordinate[axis]
    counts = [math.prod(part.shape) for part in axis_extents(base, sharding.ragged, ranks)]
    if ranks == 1:
        return local.clone().view(base)
    send = [counts[rank]] + [0] * (ranks - 1)
    receive = counts if rank == 0 else [0] * ranks
    flat = _comm.all_to_all(local.reshape(-1), send, receive, sharding.mesh.get_group(axis)).wait()
    return flat.view(base) if rank == 0 else local.new_zeros(()).expand(base).contiguous()
