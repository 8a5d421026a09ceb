"""The training job's transformer in a tiny size, dense or with experts, which are stacked or a module each."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from fsdp_runtime.train.model import MixtureOfExperts, ModelConfig, SwiGLU, Transformer


@dataclass(frozen=True)
class Shape(ModelConfig):
    vocab_size: int = 61
    dim: int = 24
    num_layers: int = 2
    num_heads: int = 4
    ff_dim: int = 40
    stacked: bool = True  # experts as 3-D weights, else each of three linears


class LinearExperts(MixtureOfExperts):
    """Each expert a SwiGLU of its own; all compute, if only on no token, so that all have gradients."""

    def __init__(self, shape: Shape):
        super().__init__(shape)
        del self.w_gate, self.w_up, self.w_down
        self.each = nn.ModuleList(SwiGLU(shape) for _ in range(shape.num_experts))

    def _experts(self, x, counts):
        return torch.cat(
            [expert(part)[0] for expert, part in zip(self.each, x.split(counts.tolist()), strict=True)]
        )


def build(shape: Shape) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(shape)
    for block in model.blocks if shape.num_experts and not shape.stacked else ():
        block.ff = LinearExperts(shape)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:  # large in routers, so that rounding does not send tokens to other experts
            nn.init.normal_(parameter, std=1.0 if "router" in name else 0.2)
    return model


def loss_of(out: tuple[torch.Tensor, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Mean over tokens of predicting the next one, and the balancing loss."""
    logits, aux = out
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten()) + 0.01 * aux
