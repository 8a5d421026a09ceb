"""Gradients in CPU memory of parameters on the device: torch lets no `.grad` be on another device than its parameter.

.grad       a tensor that takes no memory and shows NaN; writing to it raises
gradient    this rank's slice in CPU memory, found by that tensor, dropped with it (`zero_grad`)
"""

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ragged_shard import RaggedDTensor

_gradients = WeakTensorKeyDictionary()


def without_memory(local: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A tensor like this one without memory: reads as NaN (0 for integers), and cannot be written to."""
    value = float("nan") if local.is_floating_point() else 0
    return torch.full((), value, dtype=local.dtype, device=device or local.device).expand(local.shape)


def grad_on_host(param: Any, gradient: torch.Tensor) -> RaggedDTensor:
    """The `.grad` of a sharded parameter whose gradient is in CPU memory."""
    shown: RaggedDTensor = param.with_local(without_memory(gradient, param.local.device))
    _gradients[shown] = gradient
    return shown


def any_on_host() -> bool:
    """Whether any gradient of this process is there."""
    return len(_gradients) > 0


def host_gradient(grad: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's slice in CPU memory, if a `.grad` stands for it."""
    gradient: torch.Tensor | None = None if grad is None else _gradients.get(grad)
    return gradient
