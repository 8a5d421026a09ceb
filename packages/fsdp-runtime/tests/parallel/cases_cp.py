"""Context parallelism: each rank has a stretch of every sequence; its axis is folded into FSDP's mesh.

torch's ring attention takes over the flash, memory-efficient and cuDNN kernels, of which CPU has none: there
`context_parallel` raises for causal attention (`_scaled_dot_product_flash_attention_for_cpu` has no sharding strategy).
With math kernels and without a causal mask it runs, as ops on DTensors. The other two cases move keys and values, or
heads, by public API: `DTensor.redistribute`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from harness import Outcome, case, counts, train
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from ragged_shard.testing import rank_mesh

CP = "Context parallelism"
VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 24, 16, 4, 16, 4
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Each token looks back. All are (rows, heads, length, width)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def bidirectional(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


class Attention(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Two layers of attention over tokens, which know their positions."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Attention(attend) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(places)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(step: int) -> torch.Tensor:
    """Tokens, those that follow them, and their places: (3, rows, length)."""
    text = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[:, :-1], text[:, 1:], torch.arange(LENGTH).expand(BATCH, -1)])


def cross_entropy(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    tokens, targets, places = batch
    return F.cross_entropy(model(tokens, places).flatten(0, 1), targets.flatten())


# -- attention across the ranks of an axis -----------------------------------------------------------------------------


def gathered_keys(mesh: DeviceMesh) -> Attend:
    """All ranks' keys and values: one all-gather of each, and in backward one reduce-scatter."""

    def whole(t: torch.Tensor) -> torch.Tensor:
        spread = DTensor.from_local(t, mesh, [Shard(2)], run_check=False)
        return spread.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        length = q.shape[2]
        own = torch.arange(length) + mesh.get_local_rank() * length
        mask = own[:, None] >= torch.arange(length * mesh.size())
        return F.scaled_dot_product_attention(q, whole(k), whole(v), attn_mask=mask)

    return attend


def heads_for_stretches(mesh: DeviceMesh) -> Attend:
    """Some heads of whole sequences instead of a stretch of all: an all-to-all of each of q, k, v, and of the result.

    (For which DTensor takes an all-gather on CPU.)
    """

    def moved(t: torch.Tensor, source: int, target: int) -> torch.Tensor:
        spread = DTensor.from_local(t.contiguous(), mesh, [Shard(source)], run_check=False)
        return spread.redistribute(placements=[Shard(target)]).to_local()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return moved(causal(*(moved(t, 2, 1) for t in (q, k, v))), 1, 2)

    return attend


def torchs(mesh: DeviceMesh) -> Attend:
    """torch's `context_parallel` over what CPU has: math kernels, no causal mask."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        nothing = torch.zeros(2 * mesh.size())  # it asks for a buffer to cut; batches here are cut already
        with context_parallel(mesh, buffers=[nothing], buffer_seq_dims=[0]):
            return bidirectional(q, k, v)

    return attend


def run(fsdp, attend, shape=(2, 2), plain=causal) -> Outcome:
    """Train over a mesh of (dp, cp), folded into one axis for FSDP."""
    mesh = rank_mesh(*shape, names=("dp", "cp"))
    folded = mesh["dp", "cp"]._flatten("fsdp")
    row, stretch = mesh.get_local_rank("dp"), mesh.get_local_rank("cp")

    def wrap(fsdp: Any, model: Any) -> None:
        for layer in model.layers:
            layer.attend = attend(mesh["cp"])
            fsdp.fully_shard(layer, mesh=folded)
        fsdp.fully_shard(model, mesh=folded)

    return train(
        fsdp, lambda: Model(plain), wrap, cross_entropy, batches=batch,
        share=lambda whole: whole.chunk(shape[0], 1)[row].chunk(shape[1], 2)[stretch],
    )  # fmt: skip


def enter(text, expected, attend, since=(2, 11), **options) -> None:
    @case(CP, text, counts=expected, since=since, name=text)
    def entered(fsdp: Any) -> Outcome:
        return run(fsdp, attend, **options)


for _text, _attend, _counts in (
    ("gathered keys and values", gathered_keys, counts(9, 7, 1)),
    ("all-to-all of heads and sequence", heads_for_stretches, counts(21, 3, 1)),
):
    for _dp, _cp in ((2, 2), (1, 4)):
        enter(f"{_text}, causal, fsdp = dp {_dp} x cp {_cp}", _counts, _attend, shape=(_dp, _cp))
enter(
    "torch's `context_parallel`, math kernels, bidirectional, fsdp = dp 2 x cp 2", counts(13, 7, 1), torchs, (2, 13),
    plain=bidirectional,
)  # fmt: skip
