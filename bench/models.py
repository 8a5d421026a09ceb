# ruff: noqa: N803, N806, N812 - shape suffixes (B batch, T length, D dim, N tokens, E experts, H inner)
"""The models that are trained: `fsdp_runtime.train.Transformer` in many sizes, and what its layers are exchanged for.

`build(shape)` returns a model whose `.blocks` become units. It knows nothing of sharding.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of one model.

    Attributes:
        dim, layers, heads, vocab: as usual; the head dimension is `dim // heads`.
        inner: width of the feed-forward, or of one expert.
        experts, top: 0 experts is a dense model; else each token goes to `top` of them.
        stacked: one tensor for all experts, with biases, in place of three linears for each expert.
        plain_norms: norms of the blocks without weights, and queries, keys and values from one matrix.
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


def build(shape: Shape, seed: int = 0) -> nn.Module:
    """The model with the same weights for the same seed, in every process."""
    from fsdp_runtime.train import ModelConfig, Transformer

    sizes = ModelConfig(
        vocab_size=shape.vocab, dim=shape.dim, num_layers=shape.layers, num_heads=shape.heads,
        num_kv_heads=shape.heads, ff_dim=shape.inner, tied=False,
    )  # fmt: skip
    devices = [torch.cuda.current_device()] if torch.get_default_device().type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        model = Transformer(sizes)
        nn.init.normal_(model.embed.weight, std=0.02)
        for block in model.blocks:
            _exchange_layers(block, shape)
    return model


def _exchange_layers(block: Any, shape: Shape) -> None:
    if shape.plain_norms:
        block.attention_norm = nn.RMSNorm(shape.dim, elementwise_affine=False)
        block.attention = FusedAttention(shape)
        block.ff_norm = nn.RMSNorm(shape.dim, elementwise_affine=False)
    if shape.experts:
        block.ff = StackedExperts(shape) if shape.stacked else Experts(shape)


def groups_of(model: Any) -> list[dict[str, nn.Parameter]]:
    """Named parameters: one dict a block, then one of what is left."""
    blocks = [dict(block.named_parameters()) for block in model.blocks]
    rest = {n: p for n, p in model.named_parameters() if not n.startswith("blocks.")}
    return [*blocks, rest]


class FusedAttention(nn.Module):
    """Causal attention of two matrices: queries, keys and values in one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        from fsdp_runtime.train.model import rotate

        q, k, v = (
            x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in self.qkv(x_BTD).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Router(nn.Module):
    """Which experts a token goes to, and how much of each."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.top = shape.top
        self.choose = nn.Linear(shape.dim, shape.experts, bias=shape.stacked)

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        scores, chosen = self.choose(x_ND).topk(self.top, dim=-1)
        return scores.softmax(dim=-1), chosen


class Expert(nn.Module):
    """SwiGLU: gate, up, down."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(shape.dim, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Each expert three linears. One without tokens still runs, on none, so that every parameter has a gradient."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.router = Router(shape)
        self.experts = nn.ModuleList(Expert(shape) for _ in range(shape.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x_ND = x.flatten(0, -2)
        weights, chosen = self.router(x_ND)
        out = torch.zeros_like(x_ND)
        for index, expert in enumerate(self.experts):
            token, slot = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(x_ND[token]) * weights[token, slot, None])
        return out.view_as(x), _no_loss(x)


class StackedExperts(nn.Module):
    """All experts in one tensor for each matrix and bias, as GPT-OSS holds them: [experts, out, in].

    Every token goes through every expert, weighted; those not chosen weigh nothing. So no step waits for counts.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        experts, dim, inner = shape.experts, shape.dim, shape.inner
        self.router = Router(shape)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * inner, dim) * dim**-0.5)
        self.gate_up_bias = nn.Parameter(torch.zeros(experts, 2 * inner))
        self.down = nn.Parameter(torch.randn(experts, dim, inner) * inner**-0.5)
        self.down_bias = nn.Parameter(torch.zeros(experts, dim))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x_ND = x.flatten(0, -2)
        weights, chosen = self.router(x_ND)
        share_NE = torch.zeros(len(x_ND), len(self.gate_up), dtype=x.dtype, device=x.device)
        share_NE = share_NE.scatter(1, chosen, weights)
        hidden_NEH = torch.einsum("nd,ehd->neh", x_ND, self.gate_up) + self.gate_up_bias
        gate, up = hidden_NEH.chunk(2, dim=-1)
        out_NED = torch.einsum("neh,edh->ned", F.silu(gate) * up, self.down) + self.down_bias
        return (out_NED * share_NE[..., None]).sum(1).view_as(x), _no_loss(x)


def _no_loss(x: Tensor) -> Tensor:
    """The balancing loss of a layer that has none."""
    return x.new_zeros((), dtype=torch.float32)
