"""Rules for views that keep the cuts: only the shape, and the dims that are cut, change.

    (8, 6) cut along dims (0,)     view (2, 4, 6) -> dims (0, 1)     view (8, 2, 3) -> dims (0,)
                                   view (48,)     -> dims (0,)       view (6, 8)    -> dims (0, 1)

Each rank's storage stays the same; t(), [:, 2:5] and the like would need other cuts and are refused. Rows of a tensor
that is cut between rows are views of their local tensors:

    (8, 6) cut 3 | 5      [2:5] -> cut 1 | 2 rows     [4] -> (6,), all of it on rank 1
"""

import math
import operator
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.overrides import enable_reentrant_dispatch

from ragged_shard._ops.fallback import fallback, refusal
from ragged_shard._placement import RaggedShard, StridedRaggedShard
from ragged_shard._sharding import Sharding, sharding_of
from ragged_shard._tensor import RaggedDTensor
from ragged_shard._torch_compat import Op, bound


def view(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view of another shape with the same storage on each rank."""
    source = args[0]
    sharding: Sharding = source._sharding
    if sharding.axis is None:
        return fallback(func, args, kwargs)
    shape = _target_shape(func, sharding.shape, args[1:], kwargs)
    after = sharding if shape == sharding.shape else _reshaped(func, sharding, shape)
    assert after.local_shape is not None
    with enable_reentrant_dispatch():  # so that the view shares the local tensor's version counter
        local = source._local_tensor.view(after.local_shape)
    return RaggedDTensor._wrap(local, after)


def same(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Another tensor around the same local tensor, its version counter included."""
    source = args[0]
    if source._sharding.axis is None:
        return fallback(func, args, kwargs)
    return RaggedDTensor._wrap(source._local_tensor, source._sharding)


def rows(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows of a tensor that is cut between rows; a single one is on its holder."""
    name = func._schema.name.removeprefix("aten::")
    source = args[0]
    sharding: Sharding = source._sharding
    if sharding.axis is None:
        return fallback(func, args, kwargs)
    arguments = bound(func, args, kwargs)
    others = [p for axis, p in enumerate(sharding.placements) if axis != sharding.axis]
    plain = type(sharding.ragged) is RaggedShard and sharding.ragged.dims == (0,)
    along = arguments["dim"] in (0, -len(sharding.shape))
    if not (plain and along and all(type(p) is Replicate for p in others)):
        raise refusal(func, sharding)
    count = sharding.shape[0]
    if name == "select":
        if not -count <= arguments["index"] < count:
            raise IndexError(f"{func}: index {arguments['index']} is out of bounds for {count} rows")
        return _run(func, source, arguments["index"] % count, None)
    if name == "unbind":
        return [_run(func, source, index, None) for index in range(count)]
    if name == "slice":
        start, stop, step = slice(arguments["start"], arguments["end"], arguments["step"]).indices(count)
        if step != 1:
            raise refusal(func, sharding)
        return _run(func, source, start, stop)
    sizes = arguments.get("split_sizes") or [arguments["split_size"]] * -(-count // arguments["split_size"])
    stops = list(accumulate(sizes))
    return [_run(func, source, end - n, min(end, count)) for n, end in zip(sizes, stops, strict=True)]


def _run(func: Op, source: RaggedDTensor, start: int, stop: int | None) -> RaggedDTensor:
    """Rows [start, stop); without stop one, whose dimension is dropped."""
    sharding = source._sharding
    assert sharding.axis is not None
    placement, rest = sharding.ragged, tuple(sharding.shape[1:])
    size = sharding.shape[0] // placement.total_units
    end = start + 1 if stop is None else stop
    ranges = [placement.unit_range(rank) for rank in range(len(placement.local_units))]
    counts = [max(0, min(end, high * size) - max(start, low * size)) for low, high in ranges]
    if not any(counts):
        raise refusal(func, sharding)
    own = sharding.coordinate[sharding.axis]
    first = max(start - ranges[own][0] * size, 0) if counts[own] else 0
    dims, shape = ((0,), (end - start, *rest)) if stop is not None else ((0,) if rest else (), rest)
    after = list(sharding.placements)
    after[sharding.axis] = RaggedShard(dims, counts)
    target = sharding_of(sharding.mesh, after, torch.Size(shape))
    assert target.local_shape is not None
    with enable_reentrant_dispatch():
        local = source._local_tensor.narrow(0, first, counts[own]).view(target.local_shape)
    return RaggedDTensor._wrap(local, target)


def _target_shape(func: Op, shape: torch.Size, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Size:
    """The full shape of the result, computed by the op itself on a meta tensor."""
    name = func._schema.name
    if name in ("aten::view", "aten::_unsafe_view", "aten::expand"):
        size = list(rest[0])
        if size == list(shape):
            return shape
    meta = torch.empty(shape, device="meta")
    return func(meta, *rest, **kwargs).shape  # type: ignore[no-any-return]


def _reshaped(func: Op, sharding: Sharding, shape: torch.Size) -> Sharding:
    placement = sharding.ragged
    prefix_numel = math.prod(sharding.shape[: len(placement.dims)])
    mixed = isinstance(placement, StridedRaggedShard) or any(type(p) is Shard for p in sharding.placements)
    if mixed or shape.numel() != sharding.shape.numel() or not shape.numel():
        raise refusal(func, sharding)
    # Preferably the same prefix; else the shortest one whose elements the shares divide.
    prefixes = list(enumerate(accumulate(shape, operator.mul), start=1))
    fitting = [k for k, numel in prefixes if numel == prefix_numel]
    fitting += [k for k, numel in prefixes if numel % placement.total_units == 0]
    if not fitting:
        raise refusal(func, sharding)
    cut = fitting[0]
    after = RaggedShard(tuple(range(cut)), placement.local_units)
    assert sharding.axis is not None
    placements = (*sharding.placements[: sharding.axis], after, *sharding.placements[sharding.axis + 1 :])
    return sharding_of(sharding.mesh, placements, shape)
