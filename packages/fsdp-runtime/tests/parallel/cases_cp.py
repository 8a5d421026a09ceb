"""Context parallelism: each rank has a stretch of every sequence; its axis is folded into FSDP's mesh.

torch's ring attention needs kernels that CPU has not got. This case moves keys and values by `DTensor.redistribute`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from harness import Outcome, case, counts, train
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ragged_shard.testing import rank_mesh

CP = "Context parallelism"
VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 24, 16, 4, 16, 4
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Each token looks back. All are (rows, heads, length, width)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend: Attend = causal
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Two layers of attention over tokens, which know their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
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


@case(CP, "gathered keys and values, causal, fsdp = dp 2 x cp 2", counts=counts(9, 7, 1))
def gathered(fsdp: Any) -> Outcome:
    """Train over a mesh of (dp, cp), folded into one axis for FSDP."""
    mesh = rank_mesh(2, 2, names=("dp", "cp"))
    folded = mesh["dp", "cp"]._flatten("fsdp")
    row, stretch = mesh.get_local_rank("dp"), mesh.get_local_rank("cp")

    def wrap(fsdp: Any, model: Any) -> None:
        for layer in model.layers:
            layer.attend = gathered_keys(mesh["cp"])
            fsdp.fully_shard(layer, mesh=folded)
        fsdp.fully_shard(model, mesh=folded)

    return train(
        fsdp,
        Model,
        wrap,
        cross_entropy,
        batches=batch,
        share=lambda whole: whole.chunk(2, 1)[row].chunk(2, 2)[stretch],
    )
