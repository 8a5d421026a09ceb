# ruff: noqa: N803, N806  (capitals are dimensions)
"""A Llama-style transformer, dense or mixture-of-experts, top to bottom. It knows nothing of sharding.

Suffixes name dimensions: B sequences, T positions, D model, H heads, K heads of keys and values, C channels of a
head, F hidden of the feed-forward, E experts, S chosen (token, expert) pairs, N tokens, V vocabulary.

    tokens_BT -> embed -> [ x + attention(norm(x)) ; x + feed_forward(norm(x)) ] x layers -> norm -> head -> logits_BTV
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ragged_shard.device import is_cpu


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a transformer; `num_experts` 0 is a dense one."""

    vocab_size: int = 256
    dim: int = 192
    num_layers: int = 4
    num_heads: int = 6
    num_kv_heads: int = 2
    ff_dim: int = 512
    num_experts: int = 0
    top_k: int = 2
    aux_weight: float = 0.01
    tied: bool = True
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ff_dim", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.dim % self.num_heads or self.head_dim < 2:
            raise ValueError(
                f"dim {self.dim} over {self.num_heads} heads gives {self.dim / self.num_heads:g} channels a head, "
                "expected a whole number of at least 2"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads do not divide by {self.num_kv_heads} key/value heads")
        if self.num_experts < 0 or 0 < self.num_experts < self.top_k:
            raise ValueError(f"{self.num_experts} experts, of which each token takes {self.top_k}")

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.dim // self.num_heads


# ff_dim is per expert where there are experts.
PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ff_dim=88),
    "tiny-moe": ModelConfig(dim=32, num_layers=2, num_heads=4, ff_dim=40, num_experts=5, tied=False),
    "small": ModelConfig(),
    "small-moe": ModelConfig(ff_dim=256, num_experts=8, top_k=2),
    "30m": ModelConfig(dim=512, num_layers=8, num_heads=8, num_kv_heads=4, ff_dim=1536, tied=False),
    "125m": ModelConfig(dim=768, num_layers=12, num_heads=12, num_kv_heads=4, ff_dim=2560, tied=False),
    "350m": ModelConfig(dim=1024, num_layers=24, num_heads=16, num_kv_heads=8, ff_dim=2816, tied=False),
    "1b": ModelConfig(dim=2048, num_layers=18, num_heads=16, num_kv_heads=8, ff_dim=6144, tied=False),
    "1b-moe": ModelConfig(
        dim=1024, num_layers=16, num_heads=16, num_kv_heads=8, ff_dim=1024, num_experts=16, tied=False
    ),
    "7b": ModelConfig(dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, ff_dim=11008, tied=False),
}


def rope_tables(length: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotation of `length` positions, fp32, each (T, C // 2)."""
    frequency_C = theta ** (-torch.arange(0, head_dim - 1, 2, device=device, dtype=torch.float32) / head_dim)
    position_T = torch.arange(length, device=device, dtype=torch.float32)
    angle_TC = torch.outer(position_T, frequency_C)
    return angle_TC.cos(), angle_TC.sin()


def rotate(x_BHTC: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """Rotary embedding: channel pairs (i, i + C // 2) turned by their position's angle, in fp32. An odd one stays."""
    left, right, *rest = x_BHTC.float().split(cos_TC.shape[-1], dim=-1)
    turned = torch.cat((left * cos_TC - right * sin_TC, right * cos_TC + left * sin_TC, *rest), dim=-1)
    return turned.to(x_BHTC.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention: H query heads share K heads of keys and values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        H, K, C = config.num_heads, config.num_kv_heads, config.head_dim
        self.head_dim = C
        self.wq = nn.Linear(config.dim, H * C, bias=False)
        self.wk = nn.Linear(config.dim, K * C, bias=False)
        self.wv = nn.Linear(config.dim, K * C, bias=False)
        self.wo = nn.Linear(H * C, config.dim, bias=False)

    def forward(self, x_BTD: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
        """(B, T, D) in and out."""
        q_BHTC, k_BKTC, v_BKTC = (
            projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projected in (self.wq(x_BTD), self.wk(x_BTD), self.wv(x_BTD))
        )
        q_BHTC, k_BKTC = rotate(q_BHTC, cos_TC, sin_TC), rotate(k_BKTC, cos_TC, sin_TC)
        gqa = k_BKTC.shape[1] != q_BHTC.shape[1]
        y_BHTC = F.scaled_dot_product_attention(q_BHTC, k_BKTC, v_BKTC, is_causal=True, enable_gqa=gqa)
        y_BTD: Tensor = self.wo(y_BHTC.transpose(1, 2).flatten(2))
        return y_BTD


class SwiGLU(nn.Module):
    """w_down(silu(w_gate x) * w_up x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w_gate = nn.Linear(config.dim, config.ff_dim, bias=False)
        self.w_up = nn.Linear(config.dim, config.ff_dim, bias=False)
        self.w_down = nn.Linear(config.ff_dim, config.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, D) in and out, and no balancing loss."""
        y_BTD = self.w_down(F.silu(self.w_gate(x_BTD)) * self.w_up(x_BTD))
        return y_BTD, y_BTD.new_zeros((), dtype=torch.float32)


class MixtureOfExperts(nn.Module):
    """Each token goes through the `top_k` experts with the largest router outputs; no token is dropped.

    The experts' weights are stacked: one parameter (E, out, in) per projection.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.num_experts = E = config.num_experts
        self.router = nn.Linear(config.dim, E, bias=False)
        self.w_gate = nn.Parameter(torch.empty(E, config.ff_dim, config.dim))
        self.w_up = nn.Parameter(torch.empty(E, config.ff_dim, config.dim))
        self.w_down = nn.Parameter(torch.empty(E, config.dim, config.ff_dim))

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, D) in and out, and the balancing loss."""
        x_ND = x_BTD.flatten(0, 1)
        probs_BTE = self.router(x_ND).view(*x_BTD.shape[:2], -1).float().softmax(dim=-1)
        weight_BTk, chosen_BTk = probs_BTE.topk(self.top_k, dim=-1)
        weight_BTk = weight_BTk / weight_BTk.sum(dim=-1, keepdim=True)

        order_S = chosen_BTk.flatten().argsort(stable=True)  # pairs by expert; S = N * top_k
        token_S = order_S // self.top_k
        counts_E = order_S.new_zeros(probs_BTE.shape[-1])
        counts_E = counts_E.scatter_add(0, chosen_BTk.flatten(), torch.ones_like(order_S))
        y_SD = self._experts(x_ND[token_S], counts_E) * weight_BTk.flatten()[order_S, None].to(x_ND.dtype)
        y_ND = torch.zeros_like(x_ND).index_add(0, token_S, y_SD)
        return y_ND.view_as(x_BTD), balance_loss(probs_BTE, chosen_BTk)

    def _experts(self, x_SD: Tensor, counts_E: Tensor) -> Tensor:
        """Pairs sorted by expert, each through its expert's SwiGLU."""
        return swiglu_of_experts(x_SD, counts_E, self.w_gate, self.w_up, self.w_down)


def swiglu_of_experts(
    x_SD: Tensor, counts_E: Tensor, gate_EFD: Tensor, up_EFD: Tensor, down_EDF: Tensor
) -> Tensor:
    """Rows sorted by expert, `counts_E` of each, through their expert's SwiGLU. An expert may get none."""
    if x_SD.dtype == torch.bfloat16 and not is_cpu(x_SD.device):  # one kernel, and no sync with the host
        offsets_E = counts_E.cumsum(0).to(torch.int32)
        gate_SF = F.grouped_mm(x_SD, gate_EFD.transpose(1, 2), offs=offsets_E)
        up_SF = F.grouped_mm(x_SD, up_EFD.transpose(1, 2), offs=offsets_E)
        return F.grouped_mm(F.silu(gate_SF) * up_SF, down_EDF.transpose(1, 2), offs=offsets_E)
    parts = x_SD.split(_split_sizes(counts_E, len(x_SD)))
    # unbind: the backward of all slices of a stack is one stack, not a sum of E padded ones.
    experts = zip(parts, gate_EFD.unbind(), up_EFD.unbind(), down_EDF.unbind(), strict=True)
    return torch.cat([F.silu(x @ g.t()) * (x @ u.t()) @ d.t() for x, g, u, d in experts])


def _split_sizes(counts_E: Tensor, total: int) -> list[int]:
    """Rows of each expert, on the host; an even split for tensors without values (meta, fake)."""
    if counts_E.is_meta or type(counts_E).__name__ == "FakeTensor":
        E = len(counts_E)
        return [total // E + (e < total % E) for e in range(E)]
    sizes: list[int] = counts_E.tolist()
    return sizes


def balance_loss(probs_BTE: Tensor, chosen_BTk: Tensor) -> Tensor:
    """E * sum over experts of (share of choices) * (mean probability), per sequence, averaged; 1 when even.

    Per sequence, so that a batch gives the same loss on any number of ranks and microbatches.
    """
    E = probs_BTE.shape[-1]
    counts_BE = probs_BTE.new_zeros(len(probs_BTE), E).scatter_add(
        1, chosen_BTk.flatten(1), torch.ones_like(chosen_BTk, dtype=probs_BTE.dtype).flatten(1)
    )
    share_BE = counts_BE / counts_BE.sum(dim=-1, keepdim=True)
    return E * (share_BE * probs_BTE.mean(dim=1)).sum(dim=-1).mean()


class Block(nn.Module):
    """One layer: attention and feed-forward, each after a norm and with a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ff_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ff = MixtureOfExperts(config) if config.num_experts else SwiGLU(config)

    def forward(self, x_BTD: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, D) in and out, and the layer's balancing loss."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TC, sin_TC)
        y_BTD, aux = self.ff(self.ff_norm(x_BTD))
        return x_BTD + y_BTD, aux


class Transformer(nn.Module):
    """The whole model. `checkpointing` recomputes each block in backward instead of keeping its activations."""

    def __init__(self, config: ModelConfig, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.config, self.checkpointing = config, checkpointing
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Use the embedding as head if the configuration is tied (`to_empty` separates them)."""
        if self.config.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens to logits (B, T, V) and the balancing loss, a mean over layers."""
        x_BTD, config = self.embed(tokens_BT), self.config
        tables = rope_tables(tokens_BT.shape[1], config.head_dim, config.rope_theta, tokens_BT.device)
        # A block's unit would cast them, but FSDP2 of torch 2.11 does not again when the block is recomputed.
        cos_TC, sin_TC = (table.to(x_BTD.dtype) for table in tables)
        aux = x_BTD.new_zeros((), dtype=torch.float32)
        for block in self.blocks:
            if self.checkpointing and self.training:
                x_BTD, layer_aux = checkpoint(block, x_BTD, cos_TC, sin_TC, use_reentrant=False)
            else:
                x_BTD, layer_aux = block(x_BTD, cos_TC, sin_TC)
            aux = aux + layer_aux / config.num_layers
        return self.head(self.norm(x_BTD)), aux


def init_parameter(config: ModelConfig, name: str, value: Tensor, generator: torch.Generator) -> None:
    """Write a parameter's initial values: ones for norms, else normal; narrower where a residual is written."""
    if "norm" in name:
        value.fill_(1.0)
        return
    writes_residual = name.endswith(("wo.weight", "w_down.weight", "w_down"))
    std = 0.02 / math.sqrt(2 * config.num_layers) if writes_residual else 0.02
    value.normal_(0.0, std, generator=generator)


def losses_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats, a mean over tokens, and the model's balancing loss (0 where it has none)."""
    out = model(tokens)
    logits, aux = out if isinstance(out, tuple) else (out.logits, targets.new_zeros((), dtype=torch.float32))
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()), aux
