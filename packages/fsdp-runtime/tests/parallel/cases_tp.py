"""Tensor parallelism: `parallelize_module`, then `fully_shard` over the data axes."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from harness import Outcome, case, counts, train
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from layout_planner import Rows, Tile, Whole
from ragged_shard.testing import rank_mesh

TP = "Tensor parallelism"
VOCABULARY, WIDTH, HIDDEN, LENGTH = 24, 16, 32, 8
ONLY_OURS = "FSDP2 has no block policies"


class Mlp(nn.Module):
    """Column-wise, then row-wise."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """Tokens (rows, length) to logits (rows, length, vocabulary)."""

    def __init__(self, vocabulary: int = VOCABULARY, hidden: int = HIDDEN, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.tied = tied
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def tokens_of(step: int) -> torch.Tensor:
    """The whole batch of a step: inputs, and what follows them."""
    return torch.randint(0, VOCABULARY - 1, (8, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def cross_entropy(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


# -- the ways to cut ---------------------------------------------------------------------------------------------------

Parallelize = Callable[[Any, DeviceMesh], None]


def layers_only(model: Any, tp: DeviceMesh) -> None:
    """Column-wise and row-wise linear layers; everything else is whole on each rank."""
    for layer in model.layers:
        parallelize_module(layer, tp, {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()})


def vocabulary(model: Any, tp: DeviceMesh) -> None:
    """Also an embedding and a head whose rows, one a token, are cut."""
    layers_only(model, tp)
    cut = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, tp, cut)
    if model.tied:
        model.head.weight = model.embed.weight


def sequence(model: Any, tp: DeviceMesh, *, logits: Any = None) -> None:
    """Also activations between them cut along the sequence."""
    for layer in model.layers:
        plan = {
            "norm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, tp, plan)
    head = ColwiseParallel(
        input_layouts=Shard(1), output_layouts=logits or Replicate(), use_local_output=logits is None
    )
    cut = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": head,
    }
    parallelize_module(model, tp, cut)


def loss_too(model: Any, tp: DeviceMesh) -> None:
    sequence(model, tp, logits=Shard(-1))


def meshes(shape: tuple[int, ...]) -> tuple[DeviceMesh, DeviceMesh, int]:
    """The mesh of a shape, its data axes, and which share of the batch is this rank's."""
    names = ("replicate", "dp", "tp")[-len(shape) :]
    mesh = rank_mesh(*shape, names=names)
    if len(shape) == 2:
        return mesh, mesh["dp"], mesh.get_local_rank("dp")
    rank = mesh.get_local_rank("replicate") * shape[1] + mesh.get_local_rank("dp")
    return mesh, mesh["replicate", "dp"], rank


def shard(fsdp, model, parallelize, mesh, data, policy=None) -> None:
    """Tensor parallelism, then a unit for each layer and one for the rest."""
    parallelize(model, mesh["tp"])
    options = {"mesh": data} | ({} if policy is None else {"block_policy": policy})
    for layer in model.layers:
        fsdp.fully_shard(layer, **options)
    fsdp.fully_shard(model, **options)


def run(
    fsdp, parallelize, shape=(2, 2), build=Model, block=None, prepare=None, context=nullcontext, clip=None
):
    """Train over a mesh of (dp, tp), or with replicas of (replicate, dp, tp)."""
    mesh, data, rank = meshes(shape)
    policy = None if block is None else lambda name, param: block if param.ndim > 1 else None

    def wrap(fsdp: Any, model: Any) -> None:
        if prepare is not None:
            prepare(model)
        shard(fsdp, model, parallelize, mesh, data, policy)

    def both() -> nn.Module:
        model = build()
        if prepare is not None:
            prepare(model)
        return model

    with context():
        return train(
            fsdp, both, wrap, cross_entropy, batches=tokens_of, share=lambda whole: whole.chunk(data.size())[rank],
            clip=clip,
        )  # fmt: skip


def freeze(model: Any) -> None:
    """Of layers that are cut: a bias, a whole layer."""
    model.layers[0].mlp.up.bias.requires_grad_(False)
    model.layers[1].mlp.requires_grad_(False)


def enter(name, text, expected, cut, *shape, only_ours="", **options) -> None:
    """A case of `run`, by default on a mesh of tp 2 x fsdp 2."""

    @case(TP, text, counts=expected, name=name, only_ours=only_ours)
    def entered(fsdp: Any) -> Outcome:
        return run(fsdp, cut, shape or (2, 2), **options)


SEQUENCE = counts(12, 9, 6)
enter("tp2", "column-wise and row-wise layers, tp 2 x fsdp 2", counts(5, 3, 4), layers_only)
enter("tp4", "the same, tp 4 x fsdp 1", counts(all_reduce=4), layers_only, 1, 4)
enter("tp1", "the same, tp 1 x fsdp 4", counts(5, 3), layers_only, 4, 1)
enter("vocabulary2", "vocabulary-parallel embedding and head, tp 2 x fsdp 2", counts(6, 3, 6), vocabulary)
enter(
    "vocabulary_tied", "vocabulary-parallel embedding and head, tied, tp 2 x fsdp 2", counts(6, 3, 6), vocabulary,
    build=lambda: Model(tied=True),
)  # fmt: skip
enter(
    "vocabulary4", "vocabulary-parallel embedding and head, tp 4 x fsdp 1", counts(1, 0, 6), vocabulary, 1, 4
)
enter("sequence2", "sequence-parallel, tp 2 x fsdp 2", SEQUENCE, sequence)
enter("sequence4", "sequence-parallel, tp 4 x fsdp 1", counts(7, 6, 6), sequence, 1, 4)
enter("loss2", "loss-parallel, tp 2 x fsdp 2", counts(11, 9, 9), loss_too, context=loss_parallel)
enter("replicated1", "sequence-parallel, replicate 2 x fsdp 1 x tp 2", counts(7, 6, 9), sequence, 2, 1, 2)
enter("one_replica", "sequence-parallel, replicate 1 x fsdp 2 x tp 2", SEQUENCE, sequence, 1, 2, 2)
enter(
    "replicated_tp1", "vocabulary-parallel, replicate 2 x fsdp 2 x tp 1", counts(5, 3, 3), vocabulary, 2, 2, 1
)
enter("clipped", "clipped to a norm, sequence-parallel, tp 2 x fsdp 2", counts(12, 9, 8), sequence, clip=0.5)
enter(
    "clipped_replicas", "clipped to a norm, sequence-parallel, replicate 2 x fsdp 1 x tp 2", counts(7, 6, 10), sequence,
    2, 1, 2, clip=0.5,
)  # fmt: skip
enter("frozen", "frozen parameters that are cut, tp 2 x fsdp 2", counts(6, 3, 6), vocabulary, prepare=freeze)
enter(
    "uneven", "a vocabulary of 25, which tp does not divide, tp 2 x fsdp 2", counts(6, 3, 6), vocabulary,
    build=lambda: Model(vocabulary=25),
)  # fmt: skip
for _name, _block in (("rows(4)", Rows(4)), ("tiles(4, 4)", Tile(4, 4)), ("whole", Whole())):
    enter(_name, f"block policy {_name}", SEQUENCE, sequence, only_ours=ONLY_OURS, block=_block)
