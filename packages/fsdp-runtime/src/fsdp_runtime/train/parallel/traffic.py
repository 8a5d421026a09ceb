"""Bytes that a rank sends in a step under one split of the ranks or another, and which splits a run allows."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from ..config import RunConfig
from ..errors import TrainError
from ..model import ModelConfig
from .splits import AXES, Splits


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in a step, by axis.

    Attributes:
        fsdp: gathers of parameters and reductions of gradients.
        hsdp: all-reduces of gradient shards.
        tp: gathers and reduce-scatters of activations, those of an all-reduce for each.
        cp: gathers of keys and values, reduce-scatters of their gradients.
        ep: all-to-alls of tokens, where experts are evenly used.
        pp: activations and their gradients between stages.
    """

    fsdp: float = 0.0
    hsdp: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    pp: float = 0.0

    @property
    def total(self) -> float:
        """Bytes on all axes."""
        return self.fsdp + self.hsdp + self.tp + self.cp + self.ep + self.pp


def traffic_of(config: RunConfig, sizes: ModelConfig, splits: Splits, *, kept: int = 0) -> Traffic:
    """What one rank sends in a step; the rank of the pipeline with the most layers, without embedding and head.

    `kept` layers stay gathered between forward and backward.
    """
    item = 2 if config.precision == "bf16" else 4
    m, layers = config.accumulate, -(-sizes.num_layers // splits.pp)
    rows = config.batch / splits.readers  # of a step
    positions = rows * config.seq_len / splits.cp  # that this rank's tp group sees in a step
    dense, experts = _layer_elements(sizes)

    def others(ranks: int) -> float:
        return (ranks - 1) / ranks

    over = splits.shards * splits.tp // splits.ep  # ranks that the experts of one ep rank are sharded over
    shared = dense / splits.tp * others(splits.shards) + experts / splits.ep * others(over)
    times = (2 - kept / layers) * m if config.reshard else (1 if splits.pp > 1 else m)
    reductions = 1 if splits.pp > 1 else m
    fsdp = layers * shared * (times * item + reductions * 4)
    shard = layers * (dense / splits.tp / splits.shards + experts / splits.ep / over)
    kv = 2 * sizes.num_kv_heads * sizes.head_dim / splits.tp
    passes = 3 if config.checkpointing else 2  # forward, backward, and forward again
    routed = sizes.top_k * sizes.dim if sizes.num_experts else 0
    return Traffic(
        fsdp=fsdp,
        hsdp=2 * 4 * reductions * shard * others(splits.hsdp),
        tp=layers
        * passes
        * (2 if sizes.num_experts else 4)
        * positions
        * sizes.dim
        * item
        * others(splits.tp),
        cp=layers * passes * positions * splits.cp * kv * item * others(splits.cp),
        ep=layers * passes * 2 * positions / splits.tp * routed * item * others(splits.ep),
        pp=(2 * positions / splits.tp * sizes.dim * item * splits.stages / splits.pp)
        if splits.pp > 1
        else 0.0,
    )


def _layer_elements(sizes: ModelConfig) -> tuple[int, int]:
    """Elements of a layer's dense parameters, and of its experts."""
    ff = 3 * sizes.dim * sizes.ff_dim * max(1, sizes.num_experts)
    tables = sizes.vocab_size * sizes.dim * (1 if sizes.tied else 2)
    layer = (sizes.num_parameters - tables - sizes.dim) // sizes.num_layers
    return (layer - ff, ff) if sizes.num_experts else (layer, 0)


def split_config(config: RunConfig, asked: Mapping[str, int]) -> RunConfig:
    """The run with other splits: a number for each of `AXES`."""
    hsdp, tp, pp, cp, ep = (asked[axis] for axis in AXES)
    return dataclasses.replace(config, hsdp=hsdp, tp=tp, pp=pp, cp=cp, ep=ep)


def candidates(config: RunConfig, world_size: int) -> list[Splits]:
    """Every split of the ranks that the run allows, in no order."""
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    experts = divisors if config.model.num_experts else [1]
    asked = product(divisors, divisors, divisors, divisors, experts)
    return [split for sizes in asked for split in _allowed(config, sizes, world_size)]


def _allowed(config: RunConfig, asked: tuple[int, ...], world_size: int) -> list[Splits]:
    chosen = split_config(config, dict(zip(AXES, asked, strict=True)))
    try:
        chosen.check(world_size)
    except TrainError:
        return []
    return [chosen.splits(world_size)]
