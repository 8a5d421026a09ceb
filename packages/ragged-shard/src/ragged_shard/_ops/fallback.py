"""Ops outside of the table, and tensors in torch's own layouts: no ragged operand, or a refusal."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ragged_shard._layout import Layout, contiguous_stride
from ragged_shard._ops import operands
from ragged_shard._tensor import RaggedDTensor

# The gradient of a sum: one number seen as a whole tensor. Kept as it is, since each rank will look at its part only.
_EXPAND = torch.ops.aten.expand.default


def _map(fn: Callable[[Any], Any], value: Any) -> Any:
    """``fn`` of each leaf of an op's arguments or results.

    Single values and lists of them (cheaper than a pytree).
    """
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)([_map(fn, entry) for entry in value])
    return fn(value)


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [entry for entry in value if isinstance(entry, torch.Tensor)]
    return found


def as_dtensor(value: Any) -> Any:
    """A RaggedDTensor in one of torch's layouts as a plain DTensor on the same storage; anything else as it is."""
    if not isinstance(value, RaggedDTensor):
        return value
    layout = value._layout
    return DTensor.from_local(
        value._local_tensor,
        layout.mesh,
        layout.placements,
        run_check=False,
        shape=layout.shape,
        stride=value._local_tensor.stride() if layout.replicate else contiguous_stride(layout.shape),
    )


def fallback(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse an op on a ragged tensor; hand anything else to torch, or run it where all operands are Replicate."""
    leaves = _tensors((*args, *kwargs.values()))
    ragged = operands.ragged_layout(leaves)
    if ragged is not None or torch.Tag.inplace_view in func.tags:
        raise refusal(func, ragged or next(t._layout for t in leaves if isinstance(t, RaggedDTensor)))
    layouts = [leaf._layout for leaf in leaves if isinstance(leaf, RaggedDTensor)]
    in_place = func._schema.name.endswith("_")
    if not func._schema.is_mutable or in_place:
        done, result = _on_replicas(func, args, kwargs, leaves, layouts)
        if done:
            return args[0] if in_place and not isinstance(args[0], (list, tuple)) else result
    result = func(*_map(as_dtensor, args), **{k: _map(as_dtensor, v) for k, v in kwargs.items()})
    return args[0] if in_place and isinstance(args[0], RaggedDTensor) else result


def refusal(func: Any, layout: Layout) -> NotImplementedError:
    """The error for an op that has no rule."""
    return NotImplementedError(
        f"{func} has no rule for a ragged tensor ({layout}). Nothing is gathered behind your back: use "
        "full_tensor() or redistribute(placements=[Replicate()] * mesh.ndim) for the whole, or to_local() for this "
        "rank's part; the README lists the ops that have one"
    )


def _on_replicas(
    func: Any, args: Any, kwargs: Any, leaves: list[torch.Tensor], layouts: list[Layout]
) -> tuple[bool, Any]:
    """Run an op on the local tensors if all operands are the same on all ranks of a mesh: saves DTensor's dispatch."""
    first = layouts[0]
    for leaf in leaves:
        if isinstance(leaf, RaggedDTensor):
            if not leaf._layout.replicate or leaf._layout.mesh != first.mesh:
                return False, None
        elif isinstance(leaf, DTensor) or leaf.ndim:
            return False, None
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False, None

    def local(value: Any) -> Any:
        return value._local_tensor if isinstance(value, RaggedDTensor) else value

    result = func(*_map(local, args), **{k: _map(local, v) for k, v in kwargs.items()})
    if func is not _EXPAND and any(not out.is_contiguous() for out in _tensors((result,))):
        return False, None  # a transposed view, say: only a plain DTensor can carry its strides

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return RaggedDTensor._wrap(value, _replicated(first, value.shape))

    return True, _map(wrap, result)


def _replicated(layout: Layout, shape: torch.Size) -> Layout:
    if shape == layout.shape:
        return layout
    from ragged_shard._layout import layout_of

    return layout_of(layout.mesh, layout.placements, shape)
