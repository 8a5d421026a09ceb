# ruff: noqa: N803, N806, N812 - shape suffixes (B batch, T length, D dim, N tokens, E experts, H inner)
"""The models that are trained, and named workloads: a model and its batches, the same for every system.

dense     Llama, 29.9M parameters, 8 blocks            the everyday case
counts    Llama, 31.6M parameters, 9 groups, 75 tensors: exact counts, few tokens
moe       24 experts of three small linears a block, top 2: 603 tensors
tiny      seconds, for tests and dry runs

`build(shape)` returns `fsdp_runtime.train.Transformer`, some of its layers exchanged; `.blocks` become units.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of one model; the head dimension is `dim // heads`."""

    dim: int
    layers: int
    heads: int
    inner: int  # width of the feed-forward, or of one expert
    vocab: int
    experts: int = 0  # 0: a dense model; else each token goes to `top` of them
    top: int = 2
    stacked: bool = False  # one tensor for all experts, with biases, in place of three linears for each
    plain_norms: bool = False  # norms of blocks without weights; queries, keys and values from one matrix


def build(shape: Shape, seed: int = 0, device: str = "cpu") -> Any:
    """The model with the same weights for the same seed, in every process with this kind of device."""
    # Not on the device: dbuffer makes tensors when it is imported.
    from fsdp_runtime.train import ModelConfig, Transformer

    sizes = ModelConfig(
        vocab_size=shape.vocab, dim=shape.dim, num_layers=shape.layers, num_heads=shape.heads,
        num_kv_heads=shape.heads, ff_dim=shape.inner, tied=False,
    )  # fmt: skip
    devices = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.device(device), torch.random.fork_rng(devices):
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


class FusedAttention(nn.Module):
    """Causal attention of two matrices: queries, keys and values in one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        from fsdp_runtime.train.model import rotate

        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in self.qkv(x_BTD).chunk(3, -1))
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


# -- workloads ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """A model and the batch that each rank gets."""

    name: str
    shape: Shape
    batch: int  # sequences of each rank and step
    length: int  # tokens of a sequence

    @property
    def tokens(self) -> int:
        """Tokens of one rank in one step."""
        return self.batch * self.length

    def model(self, device: str = "cpu") -> nn.Module:
        """A new model, its weights the same in every process with this kind of device."""
        return build(self.shape, device=device)


def _workload(name: str, batch: int, length: int, **sizes: Any) -> Workload:
    return Workload(name, Shape(**sizes), batch, length)


_STACKED: dict[str, Any] = {"stacked": True}
WORKLOADS = {
    w.name: w
    for w in (
        _workload("dense", 4, 128, dim=512, layers=8, heads=8, inner=1408, vocab=4096),
        _workload("counts", 1, 64, dim=512, layers=8, heads=8, inner=1376, vocab=6144),
        _workload("moe", 4, 128, dim=384, layers=8, heads=6, inner=256, vocab=4096, experts=24, plain_norms=True),
        # Sizes whose rows share no small multiple, for the ablation.
        _workload("ablation", 2, 64, dim=360, layers=4, heads=6, inner=340, vocab=2048, experts=8, **_STACKED),
        _workload("tiny", 2, 16, dim=48, layers=2, heads=3, inner=96, vocab=128),
        _workload("tiny-moe", 2, 16, dim=48, layers=2, heads=3, inner=32, vocab=128, experts=5),
        # For the committed counts: what matters is structure, not size.
        _workload("gate", 1, 16, dim=64, layers=3, heads=4, inner=176, vocab=512),
        _workload("gate-stacked", 1, 16, dim=60, layers=2, heads=4, inner=60, vocab=256, experts=3, **_STACKED),
        _workload("gate-prime", 1, 16, dim=61, layers=2, heads=1, inner=127, vocab=251),
        # For GPUs: the layer sizes of an 8B model, few of them, and stacked experts.
        _workload("gpu-small", 4, 2048, dim=4096, layers=2, heads=32, inner=14336, vocab=16384),
        _workload("gpu-dense", 4, 2048, dim=4096, layers=4, heads=32, inner=14336, vocab=16384),
        _workload("gpu-stacked", 2, 1024, dim=2880, layers=4, heads=64, inner=2880, vocab=32768, experts=16,
                  **_STACKED),
        # The layers of Qwen3-30B-A3B, two of them, each token through every expert.
        _workload("gpu-experts", 1, 256, dim=2048, layers=2, heads=32, inner=768, vocab=16384, experts=128, top=8,
                  **_STACKED),
    )
}  # fmt: skip


def batch_of(workload: Workload, step: int, rank: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Tokens and targets, (batch, length) each: a noisy rule that can be learnt, so that the loss falls."""
    vocab = workload.shape.vocab
    rng = torch.Generator().manual_seed(1_000_003 * step + rank)
    rows = torch.empty(workload.batch, workload.length + 1, dtype=torch.long)
    rows[:, 0] = torch.randint(vocab, (workload.batch,), generator=rng)
    noise = torch.randint(8, rows.shape, generator=rng)
    for column in range(1, rows.shape[1]):
        rows[:, column] = (7 * rows[:, column - 1] + 3 + noise[:, column]) % vocab
    return rows[:, :-1].to(device), rows[:, 1:].to(device)


def describe(workload: Workload) -> dict[str, Any]:
    """The figures of a workload in a results file."""
    parameters = list(workload.model("meta").parameters())
    return {
        "name": workload.name,
        "parameters": sum(p.numel() for p in parameters),
        "tensors": len(parameters),
        "tokens_per_rank": workload.tokens,
        **asdict(workload.shape),
    }
