"""The scalars of an AdamW step, rounded where torch rounds them.

torch works a float lr through in Python's doubles, and a tensor lr through in the tensor's own dtype; the two give
different bits. Both are done here on the host: products and quotients of fp32 numbers are exact enough in double
that rounding the double gives what fp32 arithmetic gives.
"""

import ctypes
from dataclasses import dataclass

import torch

from block_optim.core.params import Group


@dataclass(frozen=True)
class Rates:
    """Factors and divisors of one step; names as in torch's documentation.

    Attributes:
        decay: 1 - lr * weight_decay, or None for no decay.
        first, second: 1 - beta1 and 1 - beta2.
        beta1, beta2, eps: as given.
        step_size: lr / (1 - beta1^step).
        root: sqrt(1 - beta2^step), which divides the root of the second moment.
    """

    decay: float | None
    beta1: float
    beta2: float
    first: float
    second: float
    eps: float
    step_size: float
    root: float


@dataclass(frozen=True)
class Hyper:
    """A group's options as plain values: equal ones may share a kernel call."""

    lr: float
    lr_in_fp32: bool
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool

    @staticmethod
    def of(group: Group) -> "Hyper":
        """Read a group. A tensor lr is read here, and on CUDA waited for."""
        lr, (beta1, beta2) = group["lr"], group["betas"]
        return Hyper(
            float(lr),
            isinstance(lr, torch.Tensor) and lr.dtype == torch.float32,
            float(beta1),
            float(beta2),
            float(group["eps"]),
            float(group["weight_decay"]),
            bool(group.get("maximize", False)),
        )

    def rates(self, step: float) -> Rates:
        """The scalars of step number ``step`` (from 1)."""
        correction1, correction2 = 1 - self.beta1**step, 1 - self.beta2**step
        decay = None
        if self.weight_decay != 0:
            decay = 1 - self.lr * self.weight_decay
        step_size = self.lr / correction1
        if self.lr_in_fp32:
            step_size = fp32(self.lr / fp32(correction1))
            if decay is not None:
                decay = fp32(1 - fp32(self.lr * fp32(self.weight_decay)))
        return Rates(
            decay,
            self.beta1,
            self.beta2,
            1 - self.beta1,
            1 - self.beta2,
            self.eps,
            step_size,
            correction2**0.5,
        )


def fp32(value: float) -> float:
    """The nearest fp32 number."""
    return ctypes.c_float(value).value
