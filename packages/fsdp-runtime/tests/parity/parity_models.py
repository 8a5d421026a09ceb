"""A small Llama-style model in plain torch: RMSNorm, rotary positions, grouped queries, SwiGLU; dense or with experts.

Nothing here knows of ranks. Shapes: B sequences, T tokens, C channels, H query heads, K key heads, D per head.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    vocabulary: int = 61
    width: int = 24
    layers: int = 2
    heads: int = 4
    key_heads: int = 2
    hidden: int = 40
    experts: int = 0  # none: dense
    stacked: bool = True  # experts as 3-D weights, else each of three linears
    top: int = 2
    tied: bool = True


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)).to(
            x.dtype
        )


def rotate(x_BHTD: torch.Tensor) -> torch.Tensor:
    """Rotary positions, the two halves of a head turned against each other."""
    length, half = x_BHTD.shape[-2], x_BHTD.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, device=x_BHTD.device) / half)
    angle = torch.outer(torch.arange(length, device=x_BHTD.device), frequency)
    cos, sin = angle.cos().to(x_BHTD.dtype), angle.sin().to(x_BHTD.dtype)
    a, b = x_BHTD.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.heads, self.key_heads, self.size = s.heads, s.key_heads, s.width // s.heads
        self.wq = nn.Linear(s.width, s.heads * self.size, bias=False)
        self.wk = nn.Linear(s.width, s.key_heads * self.size, bias=False)
        self.wv = nn.Linear(s.width, s.key_heads * self.size, bias=False)
        self.wo = nn.Linear(s.heads * self.size, s.width, bias=False)

    def forward(self, x_BTC):
        q, k, v = (
            w(x_BTC).unflatten(-1, (-1, self.size)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        repeat = self.heads // self.key_heads
        q, k = rotate(q), rotate(k).repeat_interleave(repeat, 1)
        y = F.scaled_dot_product_attention(q, k, v.repeat_interleave(repeat, 1), is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(s.width, s.hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(s.hidden, s.width, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class StackedExperts(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(torch.randn(s.experts, s.width, s.hidden) / 5) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(s.experts, s.hidden, s.width) / 6)

    def forward(self, expert: int, x):
        return (F.silu(x @ self.w1[expert]) * (x @ self.w3[expert])) @ self.w2[expert]


class LinearExperts(nn.Module):
    """Each expert a SwiGLU of its own."""

    def __init__(self, s: Shape):
        super().__init__()
        self.each = nn.ModuleList(SwiGLU(s) for _ in range(s.experts))

    def forward(self, expert: int, x):
        return self.each[expert](x)


class MoE(nn.Module):
    """Each token goes to its best experts; every expert computes, if only on no token, so that all have gradients."""

    def __init__(self, s: Shape):
        super().__init__()
        self.top, self.number = min(s.top, s.experts), s.experts
        self.router = nn.Linear(s.width, s.experts, bias=False)
        self.experts = StackedExperts(s) if s.stacked else LinearExperts(s)

    def forward(self, x_BTC):
        x = x_BTC.flatten(0, 1)
        weight, chosen = self.router(x).float().softmax(-1).topk(self.top, -1)
        weight = (weight / weight.sum(-1, keepdim=True)).to(x.dtype)
        y = torch.zeros_like(x)
        for expert in range(self.number):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            y = y.index_add(0, token, self.experts(expert, x[token]) * weight[token, place].unsqueeze(-1))
        return y.view_as(x_BTC)


class Block(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(s.width), RMSNorm(s.width)
        self.attention = Attention(s)
        self.feed_forward = MoE(s) if s.experts else SwiGLU(s)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.embed = nn.Embedding(s.vocabulary, s.width)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = RMSNorm(s.width)
        self.output = nn.Linear(s.width, s.vocabulary, bias=False)
        if s.tied:
            self.output.weight = self.embed.weight
        self.recompute = False

    def forward(self, tokens_BT):
        x = self.embed(tokens_BT)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.output(self.norm(x))


def build(shape: Shape, seed: int = 0) -> Llama:
    torch.manual_seed(seed)
    return Llama(shape)


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean over tokens of predicting the next one."""
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())
