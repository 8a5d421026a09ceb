"""The losses of a batch: of the built-in model and of transformers' alike."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def losses_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats per token, a mean, and the model's balancing loss (0 where it has none)."""
    return losses_from(model(tokens), targets)


def losses_from(out: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same from what the model has returned. Logits cut by token (a DTensor) need torch's ``loss_parallel``."""
    logits, aux = out if isinstance(out, tuple) else (out.logits, targets.new_zeros((), dtype=torch.float32))
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    return loss.to_local() if isinstance(loss, DTensor) else loss, aux
