"""Bytes that a rank sends in a step, counted on paper: which splits send least."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from fsdp_runtime.memory import UnitMemory

from ..config import RunConfig
from ..model import ModelConfig
from ..splits import Splits


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in a step, by axis."""

    fsdp: float  # gathers and reductions of parameters
    hsdp: float = 0.0  # all-reduces of gradient shards
    tp: float = 0.0  # gathers and reduce-scatters of activations
    cp: float = 0.0  # gathers of keys and values, and their gradients
    ep: float = 0.0  # all-to-alls of tokens, if experts are evenly used
    pp: float = 0.0  # activations between stages, and their gradients

    @property
    def total(self) -> float:
        """Bytes on all axes."""
        total: float = sum(astuple(self))
        return total


def traffic_of(config: RunConfig, sizes: ModelConfig, splits: Splits) -> Traffic:
    """Bytes that one rank sends in a step for its layers: the rank of the pipeline with the most of them."""
    item = 2 if config.precision == "bf16" else 4
    m, layers = config.accumulate, -(-sizes.num_layers // splits.pp)
    rows = config.batch / splits.readers  # of a step
    positions = rows * config.seq_len / splits.cp  # that this rank's tp group sees in a step
    dense, experts = _layer_elements(sizes)

    def others(ranks: int) -> float:
        return (ranks - 1) / ranks

    over = splits.shards * splits.tp // splits.ep  # ranks that the experts of one ep rank are sharded over
    shared = dense / splits.tp * others(splits.shards) + experts / splits.ep * others(over)
    times = 2 * m if config.reshard else (1 if splits.pp > 1 else m)
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


def traffic_of_units(config: RunConfig, units: Sequence[UnitMemory], splits: Splits) -> Traffic:
    """Bytes that one rank sends in a step of a model that only `hsdp` and `fsdp` split, all units counted."""
    gathers = sum(unit.sent * (1 if unit.kept_after_forward else 2) for unit in units)
    reductions = sum(unit.reduced for unit in units)
    shards = sum(unit.gradients for unit in units)
    return Traffic(
        fsdp=config.accumulate * (splits.shards - 1) * (gathers + reductions),
        hsdp=config.accumulate * 2 * shards * (splits.hsdp - 1) / splits.hsdp,
    )


def _layer_elements(sizes: ModelConfig) -> tuple[int, int]:
    """Elements of a layer's dense parameters, and of its experts."""
    ff = 3 * sizes.dim * sizes.ff_dim * max(1, sizes.num_experts)
    tables = sizes.vocab_size * sizes.dim * (1 if sizes.tied else 2)
    layer = (sizes.num_parameters - tables - sizes.dim) // sizes.num_layers
    return (layer - ff, ff) if sizes.num_experts else (layer, 0)
