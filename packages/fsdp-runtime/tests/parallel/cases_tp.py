"""Tensor parallelism: `parallelize_module`, then `fully_shard` over the data axes."""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from harness import Outcome, case, full, record_collectives, train
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

from block_optim import SOAP, AdamW, AdamW8bit, Muon, Shampoo, mixed_optimizer_for
from layout_planner import Block, Rows, Tile, Whole
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
        found: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return found


class Layer(nn.Module):
    """A residual block."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.mlp(self.norm(x))
        return found


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
        found: torch.Tensor = self.head(self.norm(x))
        return found


def tokens_of(step: int) -> torch.Tensor:
    """The whole batch of a step: inputs, and what follows them."""
    return torch.randint(0, VOCABULARY - 1, (8, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def cross_entropy(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The loss."""
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
    """Also the logits, up to the loss."""
    sequence(model, tp, logits=Shard(-1))


def meshes(shape: tuple[int, ...]) -> tuple[DeviceMesh, DeviceMesh, int]:
    """The mesh of a shape, its data axes, and which share of the batch is this rank's."""
    names = ("replicate", "dp", "tp")[-len(shape) :]
    mesh = rank_mesh(*shape, names=names)
    if len(shape) == 2:
        return mesh, mesh["dp"], mesh.get_local_rank("dp")
    rank = mesh.get_local_rank("replicate") * shape[1] + mesh.get_local_rank("dp")
    return mesh, mesh["replicate", "dp"], rank


def shard(
    fsdp: Any, model: Any, parallelize: Parallelize, mesh: DeviceMesh, data: DeviceMesh, policy: Any = None
) -> None:
    """Tensor parallelism, then a unit for each layer and one for the rest."""
    parallelize(model, mesh["tp"])
    options = {"mesh": data} | ({} if policy is None else {"block_policy": policy})
    for layer in model.layers:
        fsdp.fully_shard(layer, **options)
    fsdp.fully_shard(model, **options)


def run(
    fsdp: Any,
    parallelize: Parallelize,
    mesh_shape: tuple[int, ...] = (2, 2),
    build: Callable[[], nn.Module] = Model,
    block: Block | None = None,
    prepare: Callable[[Any], None] | None = None,
    context: Any = nullcontext,
    clip: float | None = None,
) -> Outcome:
    """Train over a mesh of (dp, tp), or with replicas of (replicate, dp, tp)."""
    mesh, data, rank = meshes(mesh_shape)
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
            fsdp,
            both,
            wrap,
            cross_entropy,
            batches=tokens_of,
            share=lambda whole: whole.chunk(data.size())[rank],
            clip=clip,
        )


@case(
    TP,
    "column-wise and row-wise layers, tp 2 x fsdp 2",
    counts={"all_gather": 5, "all_reduce": 4, "reduce_scatter": 3},
)
def tp2(fsdp: Any) -> Outcome:
    return run(fsdp, layers_only)


@case(TP, "the same, tp 4 x fsdp 1", counts={"all_reduce": 4})
def tp4(fsdp: Any) -> Outcome:
    return run(fsdp, layers_only, (1, 4))


@case(TP, "the same, tp 1 x fsdp 4", counts={"all_gather": 5, "reduce_scatter": 3})
def tp1(fsdp: Any) -> Outcome:
    return run(fsdp, layers_only, (4, 1))


@case(
    TP,
    "vocabulary-parallel embedding and head, tp 2 x fsdp 2",
    counts={"all_gather": 6, "all_reduce": 6, "reduce_scatter": 3},
)
def vocabulary2(fsdp: Any) -> Outcome:
    return run(fsdp, vocabulary)


@case(
    TP,
    "vocabulary-parallel embedding and head, tied, tp 2 x fsdp 2",
    counts={"all_gather": 6, "all_reduce": 6, "reduce_scatter": 3},
)
def vocabulary_tied(fsdp: Any) -> Outcome:
    return run(fsdp, vocabulary, build=lambda: Model(tied=True))


@case(TP, "vocabulary-parallel embedding and head, tp 4 x fsdp 1", counts={"all_reduce": 6, "all_gather": 1})
def vocabulary4(fsdp: Any) -> Outcome:
    return run(fsdp, vocabulary, (1, 4))


@case(TP, "sequence-parallel, tp 2 x fsdp 2", counts={"all_gather": 12, "reduce_scatter": 9, "all_reduce": 6})
def sequence2(fsdp: Any) -> Outcome:
    return run(fsdp, sequence)


@case(TP, "sequence-parallel, tp 4 x fsdp 1", counts={"reduce_scatter": 6, "all_gather": 7, "all_reduce": 6})
def sequence4(fsdp: Any) -> Outcome:
    return run(fsdp, sequence, (1, 4))


@case(TP, "loss-parallel, tp 2 x fsdp 2", counts={"all_gather": 11, "reduce_scatter": 9, "all_reduce": 9})
def loss2(fsdp: Any) -> Outcome:
    return run(fsdp, loss_too, context=loss_parallel)


@case(
    TP,
    "sequence-parallel, replicate 2 x fsdp 1 x tp 2",
    counts={"reduce_scatter": 6, "all_gather": 7, "all_reduce": 9},
)
def replicated_shards_of_one(fsdp: Any) -> Outcome:
    return run(fsdp, sequence, (2, 1, 2))


@case(
    TP,
    "sequence-parallel, replicate 1 x fsdp 2 x tp 2",
    counts={"all_gather": 12, "reduce_scatter": 9, "all_reduce": 6},
)
def one_replica(fsdp: Any) -> Outcome:
    return run(fsdp, sequence, (1, 2, 2))


@case(
    TP,
    "vocabulary-parallel, replicate 2 x fsdp 2 x tp 1",
    counts={"all_gather": 5, "reduce_scatter": 3, "all_reduce": 3},
)
def replicated_tp1(fsdp: Any) -> Outcome:
    return run(fsdp, vocabulary, (2, 2, 1))


@case(
    TP,
    "clipped to a norm, sequence-parallel, tp 2 x fsdp 2",
    counts={"all_gather": 12, "reduce_scatter": 9, "all_reduce": 8},
)
def clipped(fsdp: Any) -> Outcome:
    return run(fsdp, sequence, clip=0.5)


@case(
    TP,
    "clipped to a norm, sequence-parallel, replicate 2 x fsdp 1 x tp 2",
    counts={"reduce_scatter": 6, "all_gather": 7, "all_reduce": 10},
)
def clipped_replicas(fsdp: Any) -> Outcome:
    return run(fsdp, sequence, (2, 1, 2), clip=0.5)


def freeze(model: Any) -> None:
    """Of layers that are cut: a bias, a whole layer."""
    model.layers[0].mlp.up.bias.requires_grad_(False)
    model.layers[1].mlp.requires_grad_(False)


@case(
    TP,
    "frozen parameters that are cut, tp 2 x fsdp 2",
    counts={"all_gather": 6, "all_reduce": 6, "reduce_scatter": 3},
)
def frozen(fsdp: Any) -> Outcome:
    return run(fsdp, vocabulary, prepare=freeze)


@case(
    TP,
    "a vocabulary of 25, which tp does not divide, tp 2 x fsdp 2",
    counts={"all_gather": 6, "all_reduce": 6, "reduce_scatter": 3},
)
def uneven(fsdp: Any) -> Outcome:
    return run(fsdp, vocabulary, build=lambda: Model(vocabulary=25))


@case(
    TP,
    "block policy rows(4)",
    only_ours=ONLY_OURS,
    counts={"all_gather": 12, "reduce_scatter": 9, "all_reduce": 6},
)
def rows4(fsdp: Any) -> Outcome:
    return run(fsdp, sequence, block=Rows(4))


@case(
    TP,
    "block policy tiles(4, 4)",
    only_ours=ONLY_OURS,
    counts={"all_gather": 12, "reduce_scatter": 9, "all_reduce": 6},
)
def tiles4(fsdp: Any) -> Outcome:
    return run(fsdp, sequence, block=Tile(4, 4))


@case(
    TP,
    "block policy whole",
    only_ours=ONLY_OURS,
    counts={"all_gather": 12, "reduce_scatter": 9, "all_reduce": 6},
)
def whole(fsdp: Any) -> Outcome:
    return run(fsdp, sequence, block=Whole())


# -- optimizers --------------------------------------------------------------------------------------------------------

OPTIMIZERS = "Optimizers of block-optim under tensor parallelism: bits of one process from the same gradients"
NOT_FSDP2 = "block-optim's `test_fsdp2.py`"


def bits(
    fsdp: Any, make: Callable[[Any], Any], mesh_shape: tuple[int, ...] = (2, 2), policy: Any = None
) -> Outcome:
    """Three steps. `gradients` is the largest difference of a parameter, `counts` are those of the last `step()`."""
    mesh, data, rank = meshes(mesh_shape)
    model, twin = Model(), Model()
    twin.load_state_dict(model.state_dict())
    shard(fsdp, model, sequence, mesh, data, policy)
    ours, plain = make(model), make(twin)
    worst = 0.0
    for step in range(3):
        cross_entropy(model, tokens_of(step).chunk(data.size())[rank]).backward()
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            other.grad = full(param.grad).clone()
        with record_collectives() as record:
            ours.step()
        plain.step()
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            worst = max(worst, (full(param) - other.detach()).abs().max().item())
        ours.zero_grad()
    return Outcome(0.0, worst, None, dict(Counter(record.kinds)), record.bytes_sent)


def matrices(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Muon's parameters, if it gets them all."""
    return [(name, param) for name, param in model.named_parameters() if param.ndim > 1]


@case(
    OPTIMIZERS,
    "Muon, tp 2 x fsdp 2",
    bound=0.0,
    only_ours=NOT_FSDP2,
    counts={"all_reduce": 3, "all_to_all": 2},
)
def muon(fsdp: Any) -> Outcome:
    return bits(fsdp, lambda model: Muon(matrices(model), lr=0.02))


@case(
    OPTIMIZERS,
    "Muon, tp 4 x fsdp 1",
    bound=0.0,
    only_ours=NOT_FSDP2,
    counts={"all_reduce": 2, "all_to_all": 2},
)
def muon4(fsdp: Any) -> Outcome:
    return bits(fsdp, lambda model: Muon(matrices(model), lr=0.02), (1, 4))


@case(
    OPTIMIZERS,
    "Muon, tp 1 x fsdp 4",
    bound=0.0,
    only_ours=NOT_FSDP2,
    counts={"all_reduce": 2, "all_to_all": 2},
)
def muon1(fsdp: Any) -> Outcome:
    return bits(fsdp, lambda model: Muon(matrices(model), lr=0.02), (4, 1))


@case(
    OPTIMIZERS,
    "Muon, replicate 2 x fsdp 1 x tp 2",
    bound=0.0,
    only_ours=NOT_FSDP2,
    counts={"all_reduce": 2, "all_to_all": 2},
)
def muon_replicas(fsdp: Any) -> Outcome:
    return bits(fsdp, lambda model: Muon(matrices(model), lr=0.02), (2, 1, 2))


@case(
    OPTIMIZERS,
    "Muon, its block policy, tp 2 x fsdp 2",
    bound=0.0,
    only_ours=NOT_FSDP2,
    counts={"all_reduce": 3, "all_to_all": 2},
)
def muon_whole(fsdp: Any) -> Outcome:
    return bits(fsdp, lambda model: Muon(matrices(model), lr=0.02), policy=Muon.block_policy())


@case(
    OPTIMIZERS,
    "Muon and AdamW by `mixed_optimizer_for`, tp 2 x fsdp 2",
    bound=0.0,
    only_ours=NOT_FSDP2,
    counts={"all_reduce": 3, "all_to_all": 2},
)
def mixed(fsdp: Any) -> Outcome:
    return bits(fsdp, lambda model: mixed_optimizer_for(model, lr=0.02, verbose=False))


@case(
    OPTIMIZERS,
    "Shampoo, tp 2 x fsdp 2",
    bound=0.0,
    only_ours=NOT_FSDP2,
    counts={"all_reduce": 4, "all_to_all": 4},
)
def shampoo(fsdp: Any) -> Outcome:
    return bits(fsdp, lambda model: Shampoo(model.named_parameters(), max_preconditioner_dim=8))


@case(
    OPTIMIZERS,
    "SOAP, tp 2 x fsdp 2",
    bound=0.0,
    only_ours=NOT_FSDP2,
    counts={"all_reduce": 4, "all_to_all": 4},
)
def soap(fsdp: Any) -> Outcome:
    return bits(fsdp, lambda model: SOAP(model.named_parameters(), max_preconditioner_dim=8))


@case(OPTIMIZERS, "AdamW, tp 2 x fsdp 2", bound=0.0, only_ours=NOT_FSDP2, counts={"all_reduce": 2})
def adamw(fsdp: Any) -> Outcome:
    return bits(fsdp, lambda model: AdamW(model.named_parameters(), lr=0.02))


@case(
    OPTIMIZERS,
    "AdamW8bit of tiles, its block policy, tp 2 x fsdp 2",
    bound=0.0,
    only_ours=NOT_FSDP2,
    counts={"all_reduce": 2},
)
def adamw8bit(fsdp: Any) -> Outcome:
    options: Mapping[str, Any] = {"block": Tile(4, 4), "min_8bit_numel": 1}
    policy = AdamW8bit.block_policy(**options)
    return bits(fsdp, lambda model: AdamW8bit(model.named_parameters(), **options), policy=policy)
