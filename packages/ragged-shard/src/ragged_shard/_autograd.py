"""Gradients of to_local, from_local and redistribute.

A gradient has the placements of its tensor, with Partial replaced by Replicate (as DTensor guarantees too): each
rank's gradient is the derivative with respect to its own local tensor.
"""

import math
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
    placements = [Replicate() if isinstance(p, Partial) else p for p in sharding.placements]
    return sharding.with_placements(placements)


def local_and_sharding(tensor: Any) -> tuple[torch.Tensor, Sharding]:
    """Local tensor and sharding of a RaggedDTensor or of a DTensor of torch's."""
    sharding = getattr(tensor, "_sharding", None)
    if sharding is not None:
        return tensor._local_tensor, sharding
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            local = tensor.to_local()
        wait = getattr(local, "wait", None)
        sharding = sharding_of(tensor.device_mesh, tensor.placements, tensor.shape)
        return (wait() if wait is not None else local), sharding
    raise TypeError(f"expected a RaggedDTensor or DTensor gradient, got a plain {type(tensor).__name__}")


def _average_factor(source: Sharding, target: Sharding) -> float:
    """d(target's local) / d(source's local), which is not 1 where Partial("avg") is reduced."""
    averages = [
        source.axis_size(axis)
        for axis, (before, after) in enumerate(zip(source.placements, target.placements, strict=True))
        if before != after and isinstance(before, Partial) and before.reduce_op == "avg"
    ]
    return 1.0 / math.prod(averages)


def _redistributed(grad: Any, sharding: Sharding | None, target: Sharding, tensor_class: Any) -> Any:
    """A gradient with another sharding. Differentiable, for second derivatives, if it requires grad itself.

    It is a distributed tensor or, with its ``sharding``, a plain local one.
    """
    recorded = torch.is_grad_enabled() and grad.requires_grad
    if sharding is None:
        local, sharding = local_and_sharding(grad)
        if recorded and not isinstance(grad, tensor_class):
            grad = grad.to_local()
    else:
        local = grad
    if not recorded:
        return tensor_class._wrap(_redistribute.start(local, sharding, target).wait(), target)
    if not isinstance(grad, tensor_class):
        grad = FromLocal.apply(grad, tensor_class, sharding)
    if sharding == target:
        return grad
    return Redistribute.apply(grad, target, _redistribute.start(local.detach(), sharding, target))


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
        grad_sharding = ctx.grad_sharding or wanted
        local = grad.contiguous()
        if grad_sharding.local_shape is not None and local.shape != grad_sharding.local_shape:
            raise ValueError(
                f"grad_placements {grad_sharding.placements} give this rank a gradient of shape "
                f"{tuple(grad_sharding.local_shape)}, but to_local's result has shape {tuple(local.shape)}"
            )
        return _redistributed(
            local, grad_sharding, wanted if wanted.axis is not None else grad_sharding, ctx.tensor_class
        ), None


class FromLocal(torch.autograd.Function):
    """Local tensor -> tensor."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, tensor_class: Any, sharding: Sharding) -> Any:
        """Wrap an alias of the local tensor."""
        ctx.tensor_class, ctx.sharding = tensor_class, sharding
        return tensor_class._wrap(local.detach(), sharding)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """The gradient's local tensor, redistributed to the tensor's sharding first if it has another."""
        target = gradient_sharding(ctx.sharding)
        moved = _redistributed(grad, None, target, ctx.tensor_class)
        # Ranks use the gradient of a pending sum each for itself, so second derivatives are summands again.
        pairs = zip(ctx.sharding.placements, target.placements, strict=True)
        uses = [Partial() if isinstance(p, Partial) else q for p, q in pairs]
        return moved.to_local(grad_placements=uses), None, None


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
        moved = _redistributed(grad, None, gradient_sharding(ctx.source), ctx.tensor_class)
        factor = _average_factor(ctx.source, ctx.target)
        return moved if factor == 1.0 else moved * factor, None, None
