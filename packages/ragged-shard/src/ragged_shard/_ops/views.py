"""Rules for views that keep the cuts: these stay where they are, only the shape around them is read anew.

    (8, 6) cut along dims (0,)     view (2, 4, 6) -> dims (0, 1)     view (8, 2, 3) -> dims (0,)
                                   view (48,)     -> dims (0,)       view (6, 8)    -> dims (0, 1)

Each rank's storage is what it was; t(), [2:5] and the like would need other cuts and are refused.
"""

import math
from typing import Any

import torch
from torch.distributed.tensor import Shard

from ragged_shard._layout import Layout, layout_of
from ragged_shard._ops.fallback import fallback, refusal
from ragged_shard._ops.registry import Handler
from ragged_shard._placement import RaggedShard, StridedRaggedShard
from ragged_shard._tensor import RaggedDTensor


def view(op: Any) -> Handler:
    """A view of another shape with the same storage on each rank."""

    def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source = args[0]
        layout: Layout = source._layout
        if layout.axis is None:
            return fallback(func, args, kwargs)
        shape = _target_shape(func, layout.shape, args[1:], kwargs)
        after = layout if shape == layout.shape else _reshaped(func, layout, shape)
        assert after.local_shape is not None
        return RaggedDTensor._wrap(source._local_tensor.view(after.local_shape), after)

    return handle


def _target_shape(func: Any, shape: torch.Size, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Size:
    """The full shape that the op asks for; the op itself, on a meta tensor, knows."""
    name = func._schema.name
    if name in ("aten::view", "aten::_unsafe_view", "aten::expand"):
        size = list(rest[0])
        if size == list(shape):
            return shape
    meta = torch.empty(shape, device="meta")
    return func(meta, *rest, **kwargs).shape  # type: ignore[no-any-return]


def _reshaped(func: Any, layout: Layout, shape: torch.Size) -> Layout:
    placement = layout.ragged
    prefix_numel = math.prod(layout.shape[: len(placement.dims)])
    mixed = isinstance(placement, StridedRaggedShard) or any(type(p) is Shard for p in layout.placements)
    if mixed or shape.numel() != layout.shape.numel() or not shape.numel():
        raise refusal(func, layout)
    # Preferably the same prefix; else the shortest one whose rows the cuts fall between.
    cut = _prefix_of(shape, prefix_numel)
    if cut is None:
        fitting = (k for k in range(1, len(shape) + 1) if math.prod(shape[:k]) % placement.total_units == 0)
        cut = next(fitting, None)
    if cut is None:
        raise refusal(func, layout)
    after = RaggedShard(tuple(range(cut)), placement.local_units)
    assert layout.axis is not None
    placements = (*layout.placements[: layout.axis], after, *layout.placements[layout.axis + 1 :])
    return layout_of(layout.mesh, placements, shape)


def _prefix_of(shape: torch.Size, numel: int) -> int | None:
    """How many leading dimensions of ``shape`` make up ``numel`` elements."""
    running = 1
    for k, size in enumerate(shape, start=1):
        running *= size
        if running == numel:
            return k
    return None
