"""Muon's rule on one matrix, step by step: the tests' oracle for matrices that are cut anywhere."""

import torch
from torch import Tensor

from block_optim.muon.newton_schulz import KELLER, Triple


@torch.no_grad()
def muon_(
    weight: Tensor, grad: Tensor, momentum: Tensor, second_moment: Tensor | None = None, *, lr: float,
    weight_decay: float = 0.1, mu: float = 0.95, nesterov: bool = True, steps: tuple[Triple, ...] = (KELLER,) * 5,
    eps: float = 1e-7, ratio: float = 1.0, cautious: bool = False,
) -> None:  # fmt: skip
    """One step of a matrix, in place; with the second moment of each row, (rows, 1), NorMuon's."""
    momentum.lerp_(grad, 1 - mu)
    x = (grad.lerp(momentum, mu) if nesterov else momentum).bfloat16()
    tall = x.size(0) > x.size(1)
    x = x.mT if tall else x
    x = x / x.norm().clamp(min=eps)
    for a, b, c in steps:
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    update = (x.mT if tall else x).float()
    shrinks = (update * weight >= 0) if cautious else torch.ones_like(weight)
    if second_moment is not None:
        second_moment.lerp_(update.square().mean(1, keepdim=True), 1 - 0.95)
        update = update / (second_moment.sqrt() + 1e-8)
        update *= min(update.shape) ** 0.5 / update.norm()
    weight.mul_(1 - lr * weight_decay * shrinks).add_(update, alpha=-lr * ratio)
