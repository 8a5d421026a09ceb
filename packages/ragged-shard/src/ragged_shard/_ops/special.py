"""Rules that serve a single op or two."""

from typing import Any

import torch
import torch.distributed as dist

from ragged_shard import _comm
from ragged_shard._autograd import local_and_sharding
from ragged_shard._ops import operands
from ragged_shard._ops.fallback import fallback, refusal, require_reduced
from ragged_shard._tensor import RaggedDTensor
from ragged_shard._torch_compat import Op


def unscale(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """GradScaler's check and unscale on local tensors, then one all-reduce (4 bytes) of found_inf per cut mesh axis."""
    tensors, found_inf, inv_scale = args
    ragged = [t for t in tensors if isinstance(t, RaggedDTensor) and t._sharding.axis is not None]
    others = [t for t in tensors if not (isinstance(t, RaggedDTensor) and t._sharding.axis is not None)]
    if not ragged:
        return fallback(func, args, kwargs)
    for tensor in ragged:
        require_reduced(func, tensor._sharding)
    flag, scale = (local_and_sharding(v)[0] if operands.is_distributed(v) else v for v in args[1:])
    if others:
        func(others, found_inf, inv_scale)
    func([t._local_tensor for t in ragged], flag, scale)
    groups = dict.fromkeys(group for tensor in ragged for group in tensor._sharding.cut_groups)
    for group in groups:
        _comm.all_reduce(flag, dist.ReduceOp.MAX, group)
    return None


def equal(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.equal`` and ``allclose``: compared on each rank, then one all-reduce per cut mesh axis."""
    pair = args[:2]
    target = operands.ragged_sharding(pair)
    if target is None:
        return fallback(func, args, kwargs)
    if func._schema.name == "aten::equal" and pair[0].shape != pair[1].shape:
        return False
    require_reduced(func, target)
    same = func(*operands.to_locals(pair, [target, target], func), *args[2:], **kwargs)
    flag = torch.tensor(int(same), dtype=torch.int32, device=target.mesh.device_type)
    for group in target.cut_groups:
        _comm.all_reduce(flag, dist.ReduceOp.MIN, group)
    return bool(flag.item())


def random(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``uniform_`` and the like: draw the full tensor from this rank's generator and keep this rank's range.

    So equal seeds give the values of the unsharded tensor, and generators stay in step. Replicas agree for any
    seeds: one broadcast per mesh axis of replicas. Takes the memory of the full tensor while it draws. A tensor that is
    Replicate everywhere is drawn in place. ``randn_like`` and the like give a tensor with the sharding of the first.
    """
    in_place = func._schema.name.endswith("_")
    tensor = args[0]
    sharding = tensor._sharding
    refused = sharding.partial or (sharding.axis is None and not sharding.replicate)
    if refused or any(isinstance(a, torch.Tensor) for a in args[1:]):
        raise refusal(func, sharding)
    local = tensor._local_tensor
    if local.is_meta:
        return tensor if in_place else RaggedDTensor._wrap(func(local, *args[1:], **kwargs), sharding)
    if sharding.replicate:
        drawn = func(local, *args[1:], **kwargs)
    else:
        full = torch.empty(sharding.shape, dtype=local.dtype, device=local.device)
        drawn = operands.local_from_full(func(full, *args[1:], **kwargs), sharding, func)
    local = local.copy_(drawn) if in_place else drawn
    for axis in range(sharding.mesh.ndim):
        if axis not in sharding.cut_axes and sharding.axis_size(axis) > 1:
            flat = local.detach().reshape(-1)
            _comm.broadcast(flat, 0, sharding.mesh.get_group(axis)).wait()
            local.copy_(flat.view(local.shape))
    return tensor if in_place else RaggedDTensor._wrap(local, sharding)


def scratch(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``linalg.qr`` of a tensor that `new_empty` made, as ``orthogonal_`` calls it: of the gathered tensor."""
    tensor = args[0]
    if not getattr(tensor, "_scratch", False) or tensor.requires_grad:
        return fallback(func, args, kwargs)
    factors = []
    for factor in func(tensor.full_tensor(), *args[1:], **kwargs):
        factors.append(RaggedDTensor._wrap(factor.contiguous(), tensor._sharding.replicated(factor.shape)))
        factors[-1]._scratch = True
    return tuple(factors)


def query(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Questions about storage: passed on to the local tensor."""
    return func(args[0]._local_tensor, *args[1:], **kwargs)


def item(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``.item()`` of a number that every rank has, or that one rank of the ragged axis holds."""
    tensor = args[0]
    local, sharding = tensor._local_tensor, tensor._sharding
    if not sharding.replicate:
        if not sharding.ordinary or sharding.cut_axes != (sharding.axis,):
            raise refusal(func, sharding)
        element = local.new_zeros(1)
        element[: local.numel()] = local
        # Its bytes, of which other ranks have zeros: any number keeps its bits.
        _comm.all_reduce(element.view(torch.uint8), dist.ReduceOp.SUM, sharding.mesh.get_group(sharding.axis))
        local = element
    return func(local)


def masked_put(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x[mask] = number`` with a boolean mask that has the sharding of x."""
    in_place = func._schema.name.endswith("_")
    tensor, indices, value = args[:3]
    target = operands.ragged_sharding([tensor, *indices])
    if target is None:
        return fallback(func, args, kwargs)
    fits = len(indices) == 1 and isinstance(value, torch.Tensor) and value.ndim == 0 and not target.partial
    for operand in (tensor, *indices):
        fits = fits and isinstance(operand, RaggedDTensor) and operand._sharding == target
    if not fits or indices[0].dtype != torch.bool:
        raise refusal(func, target)
    (local,) = operands.to_locals([value], [target], func)
    result = func(tensor._local_tensor, [indices[0]._local_tensor], local, *args[3:], **kwargs)
    return tensor if in_place else RaggedDTensor._wrap(result, target)
