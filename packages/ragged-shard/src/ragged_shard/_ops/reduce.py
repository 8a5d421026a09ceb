"""Rules for ops that reduce over elements: norms, sums, products, counts, mean, min, max, any, all.

Over all elements, or over a dim that is cut, each rank reduces its elements, and one all-reduce for each mesh axis
that cuts the tensor (8 bytes per tensor for a norm, the size of the result otherwise) combines the ranks' results;
the result is Replicate there. Over dims that are not cut the reduction is local and the result stays ragged. Axes of
replicas are not involved, so an HSDP tensor reduces over its ragged axis only.

For min, max and the infinity norm NaNs travel in a second row: not every backend's MAX keeps them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from ragged_shard import _comm
from ragged_shard._ops.fallback import fallback, require_reduced
from ragged_shard._redistribute import box_views
from ragged_shard._sharding import Sharding, sharding_of
from ragged_shard._tensor import RaggedDTensor
from ragged_shard._torch_compat import Op, bound

HALVES = (torch.float16, torch.bfloat16)
_REPLICATE = Replicate()


@dataclass(frozen=True)
class Reduction:
    """How a reduction is computed on each rank, combined over ranks, and finished.

    ``local(x, dims)`` keeps the dims with size 1 and returns dtype ``work``; ``join`` is the all-reduce op; ``empty``
    is the result over no elements; ``finish(total, count)`` makes the final result over ``count`` elements each.
    """

    local: Callable[[torch.Tensor, list[int]], torch.Tensor]
    join: Any
    work: torch.dtype
    empty: float | int
    finish: Callable[[torch.Tensor, int], torch.Tensor]


def dims_of(dim: Any, ndim: int) -> list[int] | None:
    """Dimensions as a sorted list, or None for all of them."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return None
    dims = [dim] if isinstance(dim, int) else list(dim)
    for d in dims:
        if not -max(ndim, 1) <= d < max(ndim, 1):
            raise IndexError(f"dimension {d} of a {ndim}-d tensor")
    return sorted({d % ndim for d in dims}) if ndim else None


def reduced(tensor: RaggedDTensor, how: Reduction, dims: list[int] | None, keepdim: bool, func: Op) -> Any:
    """The reduction of a ragged tensor over all dims (None), or over some of which one is cut."""
    sharding = tensor._sharding
    over = list(range(len(sharding.shape))) if dims is None else dims
    count = math.prod(sharding.shape[d] for d in over)
    if dims is None:
        buffer = local_of(how, tensor._local_tensor.reshape(-1), [0]).reshape(())
    else:
        buffer = _scattered(tensor, how, over)
    buffer = join(buffer, how, sharding.cut_groups)
    shape = list(sharding.shape)
    for d in reversed(over):
        shape[d : d + 1] = [1] if keepdim else []
    result = how.finish(buffer, count).reshape(shape)
    after = tuple(p if isinstance(p, Partial) else _REPLICATE for p in sharding.placements)
    return RaggedDTensor._wrap(result, sharding_of(sharding.mesh, after, torch.Size(shape)))


def local_of(how: Reduction, x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    if all(x.shape[d] for d in dims):
        return how.local(x, dims)
    how.local(filled(x), dims)
    shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
    return torch.full(shape, how.empty, dtype=how.work, device=x.device)


def filled(x: torch.Tensor) -> torch.Tensor:
    """Ones like an empty tensor, with which an op raises as on ranks that have elements.

    torch does not look at the dtype, or for a divisor of 0, where there are none, nor for all dtypes at a single one.
    """
    return x.new_ones([n or 2 for n in x.shape])


def uncut(sharding: Sharding, dims: list[int]) -> bool:
    cut = {p.dim for a, p in enumerate(sharding.placements) if type(p) is Shard and sharding.axis_size(a) > 1}
    return all(d >= len(sharding.ragged.dims) and d not in cut for d in dims)


def within_rank(func: Op, arguments: dict[str, Any], dims: list[int]) -> Any:
    """The op over dims that no rank's share is cut in: on local tensors; placements stay, with dims renumbered."""
    tensor = arguments["self"]
    local, sharding = tensor._local_tensor, tensor._sharding
    shift = len(sharding.ragged.dims) - 1
    listed = isinstance(arguments["dim"], (list, tuple))
    local_dims = [d - shift for d in dims]
    metas = func(**{**arguments, "self": torch.empty(sharding.shape, dtype=tensor.dtype, device="meta")})
    single = isinstance(metas, torch.Tensor)
    metas = (metas,) if single else metas
    after = [sharding_of(sharding.mesh, _without(dims, sharding, meta.ndim), meta.shape) for meta in metas]
    here = local if local.numel() or not tensor.numel() else filled(local)
    results = func(**{**arguments, "self": here, "dim": local_dims if listed else local_dims[0]})
    results = (results,) if single else results
    if here is not local:
        results = [
            torch.empty(s.local_shape or (), dtype=m.dtype, device=local.device)
            for s, m in zip(after, metas, strict=True)
        ]
    wrapped = tuple([RaggedDTensor._wrap(r.contiguous(), s) for r, s in zip(results, after, strict=True)])
    return wrapped[0] if single else wrapped


def _without(dims: list[int], sharding: Sharding, ndim: int) -> tuple[Placement, ...]:
    """The placements of a result with ``ndim`` dims, of which these dims are gone if it has fewer."""
    if ndim == len(sharding.shape):
        return sharding.placements
    return tuple(
        Shard(p.dim - sum(d < p.dim for d in dims))
        if type(p) is Shard and p.dim not in dims
        else (_REPLICATE if type(p) is Shard else p)  # one whose dim is gone is on an axis of size 1
        for p in sharding.placements
    )


def _scattered(tensor: RaggedDTensor, how: Reduction, dims: list[int]) -> torch.Tensor:
    """This rank's contribution to every element of the result: its boxes, reduced into their place."""
    shape = [1 if d in dims else n for d, n in enumerate(tensor._sharding.shape)]
    buffer = torch.full(shape, how.empty, dtype=how.work, device=tensor._local_tensor.device)
    if not tensor._local_tensor.numel():
        how.local(tensor._local_tensor.new_ones([2] * len(shape)), dims)
    for box, view in box_views(tensor._local_tensor, tensor._sharding):
        place = tuple(slice(0, 1) if d in dims else s for d, s in enumerate(box.slices()))
        value = how.local(view, dims)
        if how.join is dist.ReduceOp.SUM:
            buffer[place] += value
        elif how.join is dist.ReduceOp.PRODUCT:
            buffer[place] *= value
        else:
            joined = torch.maximum if how.join is dist.ReduceOp.MAX else torch.minimum
            buffer[place] = joined(buffer[place], value)
    return buffer


def join(buffer: torch.Tensor, how: Reduction, groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    """All-reduce over these process groups, one after another."""
    if how.join in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT) or not buffer.is_floating_point():
        for group in groups:
            buffer = _comm.all_reduce(buffer, how.join, group)
        return buffer
    sign = 1.0 if how.join is dist.ReduceOp.MAX else -1.0
    nan = buffer.isnan()
    packed = torch.stack([torch.where(nan, how.empty, buffer), nan.to(buffer.dtype) * sign])
    for group in groups:
        packed = _comm.all_reduce(packed, how.join, group)
    return torch.where(packed[1] != 0, math.nan, packed[0])


def sum_like(x: torch.Tensor, dtype: torch.dtype | None, mean: bool) -> Reduction:
    integral = not x.is_floating_point() and not x.is_complex()
    out = dtype or (torch.int64 if integral else x.dtype)
    if mean and not (out.is_floating_point or out.is_complex):
        raise TypeError(f"mean of {x.dtype} needs a floating point dtype=")
    work = torch.float32 if out in HALVES else out

    def finish(total: torch.Tensor, count: int) -> torch.Tensor:
        return (total / count if mean else total).to(out)

    return Reduction(lambda v, d: v.sum(d, keepdim=True, dtype=work), dist.ReduceOp.SUM, work, 0, finish)


def extreme(x: torch.Tensor, largest: bool) -> Reduction:
    if x.is_floating_point():
        work, empty = x.dtype, -math.inf if largest else math.inf
    else:
        work = {torch.bool: torch.uint8, torch.int16: torch.int32}.get(x.dtype, x.dtype)
        empty = torch.iinfo(work).min if largest else torch.iinfo(work).max
    take = torch.amax if largest else torch.amin
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN
    dtype = x.dtype
    return Reduction(
        lambda v, d: take(v, d, keepdim=True).to(work), op, work, empty, lambda total, count: total.to(dtype)
    )


def _logical(x: torch.Tensor, every: bool) -> Reduction:
    test = torch.all if every else torch.any
    op = dist.ReduceOp.MIN if every else dist.ReduceOp.MAX
    narrow, out = torch.uint8, torch.uint8 if x.dtype == torch.uint8 else torch.bool
    return Reduction(
        lambda v, d: test(v, d, keepdim=True).to(narrow), op, narrow, int(every), lambda t, n: t.to(out)
    )


def norm_over(x: torch.Tensor, order: float, dtype: torch.dtype | None, wide: torch.dtype) -> Reduction:
    """A vector norm: local norms to the power of p, summed in ``wide`` so that large ones do not overflow.

    Raises RuntimeError for integers, also on ranks without elements, where torch does not look.
    """
    if not (x.is_floating_point() or x.is_complex()):
        raise RuntimeError(f"a norm needs a floating point or complex tensor, not {x.dtype}")
    inner = dtype or x.dtype
    out, wide = inner.to_real(), wide.to_real()
    inner = torch.float32 if inner in HALVES else inner
    real = inner.to_real()

    def local(v: torch.Tensor, dims: list[int]) -> torch.Tensor:
        norm: torch.Tensor = torch.linalg.vector_norm(v, order, dims, keepdim=True, dtype=inner)
        return norm if math.isinf(order) or order == 0 else norm.to(wide).pow(order)

    if math.isinf(order):
        op = dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN
        return Reduction(local, op, real, 0.0 if order > 0 else math.inf, lambda t, n: t.to(out))
    if order == 0:
        return Reduction(local, dist.ReduceOp.SUM, real, 0.0, lambda t, n: t.to(out))
    return Reduction(local, dist.ReduceOp.SUM, wide, 0.0, lambda t, n: t.pow(1.0 / order).to(out))


def _nansum(x: torch.Tensor, dtype: torch.dtype | None) -> Reduction:
    how = sum_like(x, dtype, False)
    return replace(how, local=lambda v, d: v.nansum(d, keepdim=True, dtype=how.work))


def _prod(x: torch.Tensor, dtype: torch.dtype | None) -> Reduction:
    how = sum_like(x, dtype, False)

    def local(v: torch.Tensor, dims: list[int]) -> torch.Tensor:
        v = v.to(how.work)
        for d in dims:
            v = v.prod(d, keepdim=True)
        return v

    return replace(how, local=local, join=dist.ReduceOp.PRODUCT, empty=1)


#: Sums and products that are made of a tensor and dtype.
COUNTED: dict[str, Callable[[torch.Tensor, torch.dtype | None], Reduction]] = {
    "count_nonzero": lambda x, dtype: Reduction(
        lambda v, d: (v != 0).sum(d, keepdim=True), dist.ReduceOp.SUM, torch.int64, 0, lambda t, n: t
    ),
    "nansum": _nansum,
    "prod": _prod,
}


def reduction(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A reduction over all or some dims."""
    kind = func._schema.name.removeprefix("aten::")
    tensor = args[0]
    if not isinstance(tensor, RaggedDTensor) or tensor._sharding.axis is None:
        return fallback(func, args, kwargs)
    arguments = bound(func, args, kwargs)
    local, shape = tensor._local_tensor, tensor._sharding.shape
    dims = dims_of(arguments.get("dim"), len(shape))
    if kind not in ("sum", "mean"):
        require_reduced(func, tensor._sharding)
    if dims is not None and uncut(tensor._sharding, dims):
        return within_rank(func, arguments, dims)
    keepdim, dtype = bool(arguments.get("keepdim", False)), arguments.get("dtype")
    if kind in ("sum", "mean"):
        how = sum_like(local, dtype, kind == "mean")
    elif kind in COUNTED:
        how = COUNTED[kind](local, dtype)
    elif kind in ("any", "all"):
        how = _logical(local, kind == "all")
    elif kind in ("linalg_vector_norm", "norm"):
        order = arguments.get("ord", arguments.get("p"))
        wide = torch.float64 if dims is None else (torch.float32 if local.dtype in HALVES else local.dtype)
        how = norm_over(local, 2.0 if order is None else float(order), dtype, wide)
    else:
        if any(shape[d] == 0 for d in (range(len(shape)) if dims is None else dims)):
            raise RuntimeError(f"{func} of a tensor of shape {tuple(shape)}: not defined over no elements")
        how = extreme(local, kind in ("max", "amax"))
    return reduced(tensor, how, dims, keepdim, func)
