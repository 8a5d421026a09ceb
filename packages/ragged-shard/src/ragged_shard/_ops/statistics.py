"""Rules for statistics: each is a few reductions, or one op of a rank's elements, and never a gather.

over dims that are not cut     the op itself, on local tensors          argmax(1), sort(1), softmax(1), std(1)
over cut dims, or everything   composed of reductions: `COMPOSED`       std(), argmax(), histc(), logsumexp(0)
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ragged_shard import _comm
from ragged_shard._ops.fallback import fallback, refusal, require_reduced
from ragged_shard._ops.operands import local_from_full
from ragged_shard._ops.reduce import HALVES, dims_of, extreme, reduced, sum_like, uncut, within_rank
from ragged_shard._tensor import RaggedDTensor
from ragged_shard._torch_compat import Op, bound

_wrap = RaggedDTensor._wrap
_LAST = torch.iinfo(torch.int64).max
_MEAN, _SUM = 1, 2  # how losses are reduced


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """A tensor in another dtype; anything else unchanged."""
    if isinstance(value, RaggedDTensor):
        return _wrap(value._local_tensor.to(dtype), value._sharding)
    return value.to(dtype) if isinstance(value, torch.Tensor) else value


def statistic(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Over uncut dims the op itself; else what `COMPOSED` says, and a refusal where it says nothing."""
    name = func._schema.name.removeprefix("aten::")
    tensor, arguments = args[0], bound(func, args, kwargs)
    if not isinstance(tensor, RaggedDTensor) or tensor._sharding.axis is None:
        return fallback(func, args, kwargs)
    sharding = tensor._sharding
    require_reduced(func, sharding)
    dims = dims_of(arguments.get("dim"), len(sharding.shape))
    if dims is not None and uncut(sharding, dims):
        return within_rank(func, arguments, dims)
    composed = COMPOSED.get(name)
    if composed is None or tensor.is_complex():
        raise refusal(func, sharding)
    if tensor.dtype in HALVES and name in IN_FP32:
        wide = {key: _cast(value, torch.float32) for key, value in arguments.items()}
        return _cast(composed(func, wide["self"], dims, wide), tensor.dtype)
    return composed(func, tensor, dims, arguments)


def _deviation(func: Op, x: Any, dims: list[int] | None, arguments: dict[str, Any]) -> Any:
    """var, std and their pairs with the mean: the mean first, then the mean of squared deviations, in fp64."""
    name, keepdim = func._schema.name.removeprefix("aten::"), bool(arguments.get("keepdim"))
    if not x.is_floating_point():
        raise refusal(func, x._sharding)
    correction = arguments.get("correction", arguments.get("unbiased"))
    over = range(x.ndim) if dims is None else dims
    count = math.prod(x.shape[d] for d in over)
    left = max(count - (1 if correction is None else float(correction)), 0)
    wide = x._local_tensor.double()
    mean = reduced(_wrap(wide, x._sharding), sum_like(wide, None, True), dims, True, func)
    centered = wide - local_from_full(mean._local_tensor, x._sharding, func)
    squares = _wrap(centered.square_(), x._sharding)
    total = reduced(squares, sum_like(wide, None, False), dims, keepdim, func)
    value = total / left if left else total * math.inf  # 0 * inf is NaN, as torch has it
    value = _cast(value.sqrt() if name.startswith("std") else value, x.dtype)
    return (value, _cast(mean.view(value.shape), x.dtype)) if name.endswith("_mean") else value


def _extremes(largest: bool) -> Callable[..., Any]:
    """Values and indices of the largest or smallest: the extreme first, then the first index that has it."""

    def values_and_indices(func: Op, x: Any, dims: list[int] | None, arguments: dict[str, Any]) -> Any:
        local, sharding, keepdim = x._local_tensor, x._sharding, bool(arguments.get("keepdim"))
        if not x.numel() or sharding.cut_axes not in ((), (sharding.axis,)):
            raise refusal(func, sharding)
        values = reduced(x, extreme(local, largest), dims, True, func)
        local_values = local_from_full(values._local_tensor, sharding, func)
        if dims is None:
            start = sharding.region.start * math.prod(local.shape[1:])
            index = torch.arange(start, start + local.numel(), device=local.device).view(local.shape)
        else:
            shape = [-1 if d == dims[0] else 1 for d in range(x.ndim)]
            ordinals = torch.arange(x.shape[dims[0]], device=local.device).view(shape)
            index = local_from_full(ordinals, sharding, func)
        same = (local == local_values) | ((local != local) & (local_values != local_values))
        first = _wrap(torch.where(same, index, _LAST), sharding)
        indices = reduced(first, extreme(index, False), dims, keepdim, func)
        return (values.view(indices.shape), indices) if len(func._schema.returns) > 1 else indices

    return values_and_indices


def _histogram(func: Op, x: Any, dims: Any, arguments: dict[str, Any]) -> Any:
    """histc: each rank counts its elements, between bounds that are the same on all ranks."""
    sharding, low, high = x._sharding, float(arguments["min"]), float(arguments["max"])
    if low == high == 0 and x.numel():
        low, high = x.amin().item(), x.amax().item()
    if low == high:
        low, high = low - 1, high + 1
    counts = torch.histc(x._local_tensor, arguments["bins"], low, high)
    for group in sharding.cut_groups:
        counts = _comm.all_reduce(counts, dist.ReduceOp.SUM, group)
    return _wrap(counts, sharding.replicated(counts.shape))


def _logsumexp(func: Op, x: Any, dims: list[int] | None, arguments: dict[str, Any]) -> Any:
    top = x.amax(dims or (), keepdim=True)
    top = torch.where(top.isinf(), 0.0, top)
    total = (x - top).exp().sum(dims, keepdim=bool(arguments["keepdim"])).log()
    return total + top.view(total.shape)


def _softmax(func: Op, x: Any, dims: list[int] | None, arguments: dict[str, Any]) -> Any:
    if arguments["half_to_float"]:
        raise refusal(func, x._sharding)
    shifted = x - x.amax(dims or (), keepdim=True)
    total = shifted.exp().sum(dims, keepdim=True)
    return shifted.exp() / total if func._schema.name == "aten::_softmax" else shifted - total.log()


def _mse(func: Op, x: Any, dims: Any, arguments: dict[str, Any]) -> Any:
    squares = (x - arguments["target"]).square()
    return {_MEAN: squares.mean, _SUM: squares.sum}.get(arguments["reduction"], lambda: squares)()


def _product(func: Op, x: Any, dims: Any, arguments: dict[str, Any]) -> Any:
    return _cast((x * arguments.get("other", arguments.get("tensor"))).sum(), x.dtype)


#: Of these narrow numbers are worked on in fp32, as torch does it.
IN_FP32 = ("dist", "dot", "vdot", "mse_loss", "logsumexp", "_softmax", "_log_softmax")

#: name -> call(func, tensor, dims (None: all), arguments by name)
COMPOSED: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("std", "var", "std_mean", "var_mean"), _deviation),
    **dict.fromkeys(("argmax", "max"), _extremes(largest=True)),
    **dict.fromkeys(("argmin", "min"), _extremes(largest=False)),
    "aminmax": lambda func, x, dims, arguments: (
        x.amin(dims or (), arguments["keepdim"]),
        x.amax(dims or (), arguments["keepdim"]),
    ),
    "dist": lambda func, x, dims, arguments: torch.linalg.vector_norm(
        x - arguments["other"], float(arguments["p"])
    ),
    **dict.fromkeys(("dot", "vdot"), _product),
    "mse_loss": _mse,
    "histc": _histogram,
    "logsumexp": _logsumexp,
    **dict.fromkeys(("_softmax", "_log_softmax"), _softmax),
}
