"""The optimizers of `--optimizer`: a table of names, classes and arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import block_optim
from layout_planner import Tile, parse_block

from .errors import TrainError

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class OptimizerSpec:
    """One row: a class, its default learning rate, and further arguments."""

    cls: Callable[..., Optimizer]
    lr: float
    extra: tuple[tuple[str, Any], ...] = ()
    routed: bool = False  # it takes matrices only: `block_optim.mixed_optimizer_for` sends the rest to AdamW
    rotates: bool = False  # it works in a basis of each dimension, except the vocabulary's with its rare rows

    @property
    def is_torch(self) -> bool:
        """True for torch's optimizers; block_optim's declare blocks, and their step takes the gradients' norm."""
        return self.cls.__module__.startswith("torch.")


_BETAS = ("betas", (0.9, 0.95))
OPTIMIZERS: dict[str, OptimizerSpec] = {
    "torch-adamw": OptimizerSpec(torch.optim.AdamW, 2e-3, (_BETAS,)),
    "torch-sgd": OptimizerSpec(torch.optim.SGD, 0.3, (("momentum", 0.9),)),
    "adamw": OptimizerSpec(block_optim.AdamW, 2e-3, (_BETAS,)),
    "adamw8bit": OptimizerSpec(block_optim.AdamW8bit, 2e-3, (_BETAS,)),
    "muon": OptimizerSpec(block_optim.Muon, 6e-3, (_BETAS,), routed=True),
    "shampoo": OptimizerSpec(block_optim.Shampoo, 2e-3),
    "soap": OptimizerSpec(block_optim.SOAP, 2e-3, rotates=True),
}


def optimizer_spec(name: str) -> OptimizerSpec:
    """The row of a name; raises `TrainError` if there is none."""
    if name not in OPTIMIZERS:
        raise TrainError(f"--optimizer {name!r}: expected one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


def make_optimizer(name: str, model: nn.Module, *, lr: float | None, weight_decay: float) -> Optimizer:
    """An optimizer of a sharded or plain model, by default with the table's rate. Vectors get no weight decay."""
    spec = optimizer_spec(name)
    peak = spec.lr if lr is None else lr
    if spec.routed:
        decay = {"weight_decay": weight_decay}
        adamw = {**decay, **dict(spec.extra)}
        return block_optim.mixed_optimizer_for(
            model, lr=peak, muon=decay, adamw=adamw, decay_vectors=False, verbose=False
        )
    groups = decay_groups(model, weight_decay, rotates=spec.rotates)
    return spec.cls(groups, lr=peak, **dict(spec.extra))


def declared_blocks(name: str, model: nn.Module, units: list[nn.Module], world_size: int) -> Any:
    """The block policy of an optimizer, for a model before it is sharded; None if it needs none."""
    spec = optimizer_spec(name)
    if spec.is_torch:
        return None
    if spec.routed:
        return block_optim.Recipe(model, units=units, world_size=world_size)
    return spec.cls.block_policy()  # type: ignore[attr-defined]


def parse_block_option(text: str) -> Any:
    """The block policy of ``--block``, None for "auto" and "none". Tiles are of matrices; vectors are cut anywhere."""
    if text in ("auto", "none"):
        return None
    try:
        block = parse_block(text)
    except ValueError as error:
        raise TrainError(f"--block {text!r}: {error}") from error
    least = 2 if isinstance(block, Tile) else 0
    return lambda name, parameter: block if parameter.ndim >= least else None


def decay_groups(model: nn.Module, weight_decay: float, *, rotates: bool = False) -> Groups:
    """Named matrices with weight decay, vectors without; a group that would be empty is left out.

    For an optimizer that rotates, matrices with a row for each token are a separate group, whose rows are not rotated.
    """
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding) and rotates]
    tokens = {m.num_embeddings for m in embeddings}
    heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features in tokens]
    by_token = {id(m.weight) for m in (*embeddings, *heads)}
    tables = [pair for pair in named if id(pair[1]) in by_token]
    matrices = [pair for pair in named if pair[1].ndim >= 2 and id(pair[1]) not in by_token]
    vectors = [pair for pair in named if pair[1].ndim < 2]
    least = min((len(parameter) for _, parameter in tables), default=0)
    groups: Groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": tables, "weight_decay": weight_decay, "diagonal_above": max(least - 1, 1)},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
