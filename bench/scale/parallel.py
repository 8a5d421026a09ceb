"""The same layouts where ranks share matrices or experts, as trainers of large models run them.

    tp   matrices over the GPUs of a node, with sequence parallelism: four exchanges of activations a layer and pass
    ep   experts over `ep` GPUs, tokens to them and back: two all-to-alls a layer and pass

As torchtitan lays them out: dense parameters are sharded over all ranks / tp, experts over all ranks / ep. FSDP2 cuts
the experts of a rank along dimension 1 where there are fewer of them than ranks to cut over (`Shard(1)`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from fsdp_runtime.train.network import Cluster

from .padding import padded_group
from .rules import Rules

_ROWS_CUT = (
    "o_proj.weight",
    "down_proj.weight",
)  # by columns: their inputs are what other matrices cut by rows


@dataclass(frozen=True)
class Parallel:
    """How many GPUs share matrices, and experts."""

    tp: int = 1
    ep: int = 1

    @property
    def label(self) -> str:
        """What a layout's name ends with."""
        return "".join(f" + {name.upper()} {n}" for name, n in (("tp", self.tp), ("ep", self.ep)) if n > 1)


# What users take: matrices inside a node where there are no experts; DeepSeek-V3's report names 64 for its experts.
USUAL = {
    "llama-3-70b": Parallel(tp=8),
    "gpt-oss-120b": Parallel(ep=8),
    "deepseek-v3": Parallel(ep=64),
}


@dataclass(frozen=True)
class Part:
    """Some of a layer's parameters on their mesh: elements of the buffer of all its ranks, how many, how far apart."""

    padded: int
    ranks: int
    stride: int


def parts_of(group: Any, rules: Rules, ranks: int, parallel: Parallel) -> Iterator[Part]:
    """The dense parameters and the experts of one layer under a layout."""
    dense = tuple(
        _cut(entry, parallel.tp) for entry in group.tensors if entry.experts == 1 or parallel.ep == 1
    )
    yield _part(replace(group, tensors=dense), rules, ranks // parallel.tp, parallel.tp)
    experts = tuple(e for e in group.tensors if e.experts > 1) if parallel.ep > 1 else ()
    if experts:
        over = ranks // parallel.ep
        by_rows = rules.padding.startswith("even") and over > experts[0].experts // parallel.ep
        mine = tuple(_some_experts(entry, parallel.ep, by_rows) for entry in experts)
        yield _part(replace(group, tensors=mine), rules, over, parallel.ep)


@cache
def _part(group: Any, rules: Rules, ranks: int, stride: int) -> Part:
    from layout_planner import parse_block

    return Part(padded_group(group.specs(parse_block(rules.block)), ranks, rules.padding), ranks, stride)


def _cut(entry: Any, tp: int) -> Any:
    """A tensor's share of one rank of tp; vectors stay whole."""
    if tp == 1 or len(entry.shape) < 2:
        return entry
    dim = 1 if entry.name.endswith(_ROWS_CUT) else 0
    shape = tuple(-(-size // tp) if d == dim else size for d, size in enumerate(entry.shape))
    return replace(entry, shape=shape)


def _some_experts(entry: Any, ep: int, by_rows: bool) -> Any:
    """The experts of one rank of ep; with their rows first, where these are what is cut."""
    experts = entry.experts // ep
    rows, *rest = entry.shape[1:]
    shape = (rows, experts, *rest) if by_rows else (experts, rows, *rest)
    return replace(entry, shape=shape, experts=1 if by_rows else experts)


def exchanges(group: Any, parallel: Parallel, routed: int, tokens: int, cluster: Cluster) -> float:
    """Seconds that one pass through a layer waits for activations; bf16."""
    hidden = next((e.shape[-1] for e in group.tensors if e.name.endswith("q_proj.weight")), 0) or next(
        (e.shape[-1] for e in group.tensors if e.name.endswith("q_a_proj.weight")), 0
    )
    row = 2.0 * tokens * hidden
    waits = 4 * cluster.gather(row * parallel.tp, parallel.tp) if hidden else 0.0
    if any(entry.experts > 1 for entry in group.tensors):
        waits += 2 * cluster.exchange(row * routed, parallel.ep)
    return waits


def held_by_exchanges(hidden: int, parallel: Parallel, routed: int, tokens: int) -> float:
    """Bytes of activations in addition: the gathered input of matrices, or tokens that come and go."""
    return 2.0 * tokens * hidden * (parallel.tp - 1 + (2 * routed if parallel.ep > 1 else 0))
