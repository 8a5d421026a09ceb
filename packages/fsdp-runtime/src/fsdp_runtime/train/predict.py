"""How long a step takes under one split or another, on paper: compute, what travels on each axis, and the bubble.

    step = (compute + exchanges that compute waits for + what of fsdp's it does not cover) / (1 - bubble)

Only the order of splits is meant to hold, and only where the assumptions do (`assumptions` says them).
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from .config import RunConfig
from .errors import TrainError
from .model import ModelConfig, flops_per_token
from .network import Cluster
from .splits import AXES, Splits

_FLOPS = 989e12  # dense bf16 of an H100, where this machine has no GPU whose peak is known
_REACHED = 0.5  # of the peak, by matrix products


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


@dataclass(frozen=True)
class Prediction:
    """One split on paper; seconds, but for `bubble` (a share of the step) and `traffic` (bytes)."""

    splits: Splits
    seconds: float
    compute: float
    waiting: float
    bubble: float
    traffic: Traffic


def predict(
    config: RunConfig, sizes: ModelConfig, splits: Splits, cluster: Cluster, flops: float, *, kept: int = 0
) -> Prediction:
    """Predict a step of a run.

    Args:
        config, sizes: the run and its model, with the data's vocabulary.
        splits: how ranks are divided.
        cluster: what they run on.
        flops: FLOP/s that a rank reaches.
        kept: layers that stay gathered between forward and backward.
    """
    traffic = traffic_of(config, sizes, splits, kept=kept)
    again = 4 / 3 if config.checkpointing else 1
    work = flops_per_token(sizes, config.seq_len) * config.batch * config.seq_len * again
    compute = work / splits.world_size / flops

    def gathers(sent: float, ranks: int, stride: int) -> float:
        return cluster.gather(sent * ranks / max(ranks - 1, 1), ranks, stride)

    calls = -(-sizes.num_layers // splits.pp) * config.accumulate * 4  # there and back, forward and backward
    strides = _strides(splits)
    exposed = calls * gathers(traffic.tp / calls, splits.tp, 1)
    exposed += calls * gathers(traffic.cp / calls, splits.cp, strides["cp"])
    ep_sent = traffic.ep * splits.ep / max(splits.ep - 1, 1)
    exposed += calls * cluster.exchange(ep_sent / calls, splits.ep)
    sends = 2 * config.accumulate * splits.stages // splits.pp
    exposed += sends * cluster.send(traffic.pp / sends, strides["pp"]) if splits.pp > 1 else 0.0
    hidden = gathers(traffic.fsdp, splits.shards, splits.tp)
    hidden += 2 * gathers(traffic.hsdp / 2, splits.hsdp, strides["hsdp"])
    waiting = exposed + max(0.0, hidden - compute)
    bubble = splits.bubble(config.accumulate)
    return Prediction(splits, (compute + waiting) / (1 - bubble), compute, waiting, bubble, traffic)


def _strides(splits: Splits) -> dict[str, int]:
    """How many ranks apart the neighbors of an axis are."""
    cp = splits.tp
    return {"cp": cp, "hsdp": cp * splits.shards, "pp": cp * splits.shards * splits.hsdp}


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


def assumptions(cluster: Cluster, flops: float, source: str) -> list[str]:
    """What the order of splits takes for granted, in words."""
    return [
        f"compute at {flops / 1e12:.0f} TFLOP/s a rank ({source}), divided evenly; experts evenly used",
        f"nodes of {cluster.node} ranks, {cluster.nvlink / 1e9:.0f} GB/s inside and {cluster.nic / 1e9:.0f} GB/s "
        f"between them for each, {cluster.efficiency:.0%} reached",
        "gathers and reductions of parameters run next to compute; tp, cp, ep and pp are waited for",
    ]


def reached_flops(peak: float | None) -> tuple[float, str]:
    """FLOP/s that matrix products reach, and where that comes from."""
    source = "half of this GPU's peak" if peak else "half of an H100's peak in bf16; no GPU here"
    return _REACHED * (peak or _FLOPS), source
