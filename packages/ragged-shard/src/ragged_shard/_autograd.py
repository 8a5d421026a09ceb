"""Gradients through the calls that leave or enter a layout: to_local, from_local, redistribute.

A gradient has the placements of the tensor it belongs to, Partial turned into Replicate (what DTensor
guarantees too): each rank's gradient is the derivative by its own local tensor.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from ragged_shard import _redistribute
from ragged_shard._comm import Pending
from ragged_shard._layout import Layout, layout_of


def gradient_layout(layout: Layout) -> Layout:
    """Where the gradient of a tensor of this layout lies."""
    if not layout.partial:
        return layout
    return layout.with_placements(
        tuple(Replicate() if isinstance(p, Partial) else p for p in layout.placements)
    )


def local_and_layout(tensor: Any) -> tuple[torch.Tensor, Layout]:
    """The local tensor and layout of a RaggedDTensor or of torch's own DTensor."""
    layout = getattr(tensor, "_layout", None)
    if layout is not None:
        return tensor._local_tensor, layout
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            local = tensor.to_local()
        wait = getattr(local, "wait", None)
        return (wait() if wait is not None else local), layout_of(
            tensor.device_mesh, tensor.placements, tensor.shape
        )
    raise TypeError(f"expected a RaggedDTensor or DTensor gradient, got a plain {type(tensor).__name__}")


def _average_factor(source: Layout, target: Layout) -> float:
    """d(target's local) / d(source's local) where averages are begun or ended."""
    factor = 1.0
    for axis, (p, q) in enumerate(zip(source.placements, target.placements, strict=True)):
        if p == q:
            continue
        if isinstance(p, Partial) and p.reduce_op == "avg":
            factor /= source.axis_size(axis)
        if isinstance(q, Partial) and q.reduce_op == "avg":
            factor *= source.axis_size(axis)
    return factor


class ToLocal(torch.autograd.Function):
    """Tensor -> its local tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, grad_layout: Layout | None) -> torch.Tensor:
        """Alias the local tensor, so that autograd's marks do not land on the tensor's own."""
        ctx.tensor_class, ctx.layout, ctx.grad_layout = type(tensor), tensor._layout, grad_layout
        local: torch.Tensor = tensor._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Wrap the local gradient; a ragged tensor's gradient comes back in the tensor's own layout."""
        wanted = gradient_layout(ctx.layout)
        given = ctx.grad_layout or wanted
        local = grad.contiguous()
        if given.local_shape is not None and local.shape != given.local_shape:
            raise ValueError(
                f"grad_placements {given.placements} give this rank a gradient of shape "
                f"{tuple(given.local_shape)}, but to_local's result has shape {tuple(local.shape)}"
            )
        if wanted.axis is not None and given != wanted:
            local = _redistribute.start(local, given, wanted).wait()
            given = wanted
        return ctx.tensor_class._wrap(local, given), None


class FromLocal(torch.autograd.Function):
    """Local tensor -> tensor."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, tensor_class: Any, layout: Layout) -> Any:
        """Wrap an alias of the local tensor."""
        ctx.layout = layout
        return tensor_class._wrap(local.view_as(local), layout)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """The local part of the gradient, brought to the tensor's layout first if it is elsewhere."""
        local, given = local_and_layout(grad)
        return _redistribute.start(local, given, gradient_layout(ctx.layout)).wait(), None, None


class Redistribute(torch.autograd.Function):
    """Tensor -> the same tensor in another layout; ``pending`` is the transfer, already under way."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, target: Layout, pending: Pending) -> Any:
        """Finish the transfer and wrap what came."""
        ctx.source, ctx.target = tensor._layout, target
        return type(tensor)._wrap(pending.wait(), target)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Bring the gradient back to the source's layout: a local copy for Ragged -> Replicate."""
        local, given = local_and_layout(grad)
        moved = _redistribute.start(local, given, gradient_layout(ctx.source)).wait()
        factor = _average_factor(ctx.source, ctx.target)
        if factor != 1.0:
            moved = moved * factor
        from ragged_shard._tensor import RaggedDTensor

        return RaggedDTensor._wrap(moved, gradient_layout(ctx.source)), None, None
