"""Gradients of to_local, from_local and redistribute.

A gradient has the placements of its tensor, with Partial replaced by Replicate (as DTensor guarantees too): each
rank's gradient is the derivative with respect to its own local tensor.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from ragged_shard import _redistribute
from ragged_shard._comm import Pending
from ragged_shard._sharding import Sharding, sharding_of


def gradient_sharding(sharding: Sharding) -> Sharding:
    """The sharding of the gradient of a tensor with this sharding."""
    if not sharding.partial:
        return sharding
    return sharding.with_placements(
        tuple(Replicate() if isinstance(p, Partial) else p for p in sharding.placements)
    )


def local_and_sharding(tensor: Any) -> tuple[torch.Tensor, Sharding]:
    """Local tensor and sharding of a RaggedDTensor or of a DTensor of torch's."""
    sharding = getattr(tensor, "_sharding", None)
    if sharding is not None:
        return tensor._local_tensor, sharding
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            local = tensor.to_local()
        wait = getattr(local, "wait", None)
        return (wait() if wait is not None else local), sharding_of(
            tensor.device_mesh, tensor.placements, tensor.shape
        )
    raise TypeError(f"expected a RaggedDTensor or DTensor gradient, got a plain {type(tensor).__name__}")


def _average_factor(source: Sharding, target: Sharding) -> float:
    """d(target's local) / d(source's local), which is not 1 where Partial("avg") comes or goes."""
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
    def forward(ctx: Any, tensor: Any, grad_sharding: Sharding | None) -> torch.Tensor:
        """Return an alias of the local tensor, so that autograd does not modify the tensor's own."""
        ctx.tensor_class, ctx.sharding, ctx.grad_sharding = type(tensor), tensor._sharding, grad_sharding
        local: torch.Tensor = tensor._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Wrap the local gradient; the gradient of a ragged tensor is redistributed to the tensor's own sharding."""
        wanted = gradient_sharding(ctx.sharding)
        given = ctx.grad_sharding or wanted
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
    def forward(ctx: Any, local: torch.Tensor, tensor_class: Any, sharding: Sharding) -> Any:
        """Wrap an alias of the local tensor."""
        ctx.sharding = sharding
        return tensor_class._wrap(local.view_as(local), sharding)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """The gradient's local tensor, redistributed to the tensor's sharding first if it has another."""
        local, given = local_and_sharding(grad)
        return _redistribute.start(local, given, gradient_sharding(ctx.sharding)).wait(), None, None


class Redistribute(torch.autograd.Function):
    """Tensor -> the same tensor in another sharding; ``pending`` is the transfer, already started."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, target: Sharding, pending: Pending) -> Any:
        """Complete the transfer and wrap the result."""
        ctx.tensor_class, ctx.source, ctx.target = type(tensor), tensor._sharding, target
        return ctx.tensor_class._wrap(pending.wait(), target)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Redistribute the gradient to the source's sharding: a local copy for Ragged -> Replicate."""
        local, given = local_and_sharding(grad)
        moved = _redistribute.start(local, given, gradient_sharding(ctx.source)).wait()
        factor = _average_factor(ctx.source, ctx.target)
        if factor != 1.0:
            moved = moved * factor
        return ctx.tensor_class._wrap(moved, gradient_sharding(ctx.source)), None, None
