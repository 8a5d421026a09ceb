# ruff: noqa: N803, N806, N812 - shape suffixes (B batch, L length, D dim, T tokens, E experts, H heads, K head dim)
"""Small Llama-style models, free of any parallelism: dense, with separate experts, with stacked experts.

`build(shape)` returns a module whose `.blocks` are what a system wraps one by one. Importing this file imports torch.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Shape:
    """Sizes of one model.

    Attributes:
        dim, layers, heads, vocab: as usual; the head dimension is `dim // heads`.
        inner: width of the feed-forward part, or of one expert.
        experts, top: 0 experts is a dense model; else each token goes to `top` of them.
        stacked: one tensor for all experts, with biases, in place of three linears for each expert.
        plain_norms: norms of the blocks without weights.
    """

    dim: int
    layers: int
    heads: int
    inner: int
    vocab: int
    experts: int = 0
    top: int = 2
    stacked: bool = False
    plain_norms: bool = False


def build(shape: Shape, seed: int = 0) -> "Llama":
    """The model with the same weights for the same seed, whoever asks."""
    devices = [torch.cuda.current_device()] if torch.get_default_device().type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        return Llama(shape)


class Llama(nn.Module):
    """Embedding, blocks, norm, head: logits of shape (batch, length, vocab)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        x_BLD = self.embed(tokens_BL)
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return self.head(self.norm(x_BLD))


class Block(nn.Module):
    """Attention, then a dense or a routed feed-forward part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        affine = not shape.plain_norms
        self.norm1 = nn.RMSNorm(shape.dim, elementwise_affine=affine)
        self.attention = FusedAttention(shape) if shape.plain_norms else Attention(shape)
        self.norm2 = nn.RMSNorm(shape.dim, elementwise_affine=affine)
        self.feed = FeedForward(shape.dim, shape.inner)
        if shape.experts:
            self.feed = StackedExperts(shape) if shape.stacked else Experts(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


def _rotate(x_BHLK: torch.Tensor) -> torch.Tensor:
    """Rotary positions over the even part of the head dimension."""
    length, half = x_BHLK.shape[-2], x_BHLK.shape[-1] // 2
    if half == 0:
        return x_BHLK
    rates = 10000.0 ** -(torch.arange(half, device=x_BHLK.device) / half)
    angles = torch.arange(length, device=x_BHLK.device)[:, None] * rates
    cos, sin = angles.cos().to(x_BHLK.dtype), angles.sin().to(x_BHLK.dtype)
    a, b, rest = x_BHLK[..., :half], x_BHLK[..., half : 2 * half], x_BHLK[..., 2 * half :]
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=-1)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> torch.Tensor:
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True)
    return out.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Four matrices."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q, self.k, self.v, self.out = (nn.Linear(shape.dim, shape.dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(_attend(self.q(x), self.k(x), self.v(x), self.heads))


class FusedAttention(nn.Module):
    """Two matrices: queries, keys and values in one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(_attend(*self.qkv(x).chunk(3, dim=-1), self.heads))


class FeedForward(nn.Module):
    """SwiGLU: gate, up, down. Also one expert."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(dim, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Router(nn.Module):
    """Which experts a token goes to, and how much of each."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.top = shape.top
        self.choose = nn.Linear(shape.dim, shape.experts, bias=shape.stacked)

    def forward(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, chosen = self.choose(x_TD).topk(self.top, dim=-1)
        return scores.softmax(dim=-1), chosen


class Experts(nn.Module):
    """Each expert three linears. One without tokens still runs, on none, so that every parameter has a gradient."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.router = Router(shape)
        self.experts = nn.ModuleList(FeedForward(shape.dim, shape.inner) for _ in range(shape.experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_TD = x.flatten(0, -2)
        weights, chosen = self.router(x_TD)
        out = torch.zeros_like(x_TD)
        for index, expert in enumerate(self.experts):
            token, slot = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(x_TD[token]) * weights[token, slot, None])
        return out.view_as(x)


class StackedExperts(nn.Module):
    """All experts in one tensor for each matrix and bias, as GPT-OSS holds them: [experts, out, in]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        experts, dim, inner = shape.experts, shape.dim, shape.inner
        self.router = Router(shape)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * inner, dim) * dim**-0.5)
        self.gate_up_bias = nn.Parameter(torch.zeros(experts, 2 * inner))
        self.down = nn.Parameter(torch.randn(experts, dim, inner) * inner**-0.5)
        self.down_bias = nn.Parameter(torch.zeros(experts, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_TD = x.flatten(0, -2)
        weights, chosen = self.router(x_TD)
        share_TE = torch.zeros(len(x_TD), len(self.gate_up), dtype=x.dtype, device=x.device)
        share_TE = share_TE.scatter(1, chosen, weights)
        # Few experts: every token through every one, weighted; unchosen ones weigh nothing.
        gate, up = (torch.einsum("td,ehd->teh", x_TD, self.gate_up) + self.gate_up_bias).chunk(2, dim=-1)
        out_TED = torch.einsum("teh,edh->ted", F.silu(gate) * up, self.down) + self.down_bias
        return (out_TED * share_TE[..., None]).sum(1).view_as(x)
