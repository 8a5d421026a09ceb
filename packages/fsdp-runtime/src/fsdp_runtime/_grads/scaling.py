"""The divisors of a sum of gradients over ranks: when each applies, and in which collective."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

Op = Literal["avg", "sum"]
AllReduceHook = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class ReduceOptions:
    """The user's settings of a unit's reductions. A reduction keeps the settings of its launch."""

    # sums are divided by this. Defaults to the number of data-parallel ranks
    divide_factor: float | None = None
    force_sum: bool = False  # send sums only, and divide afterwards
    all_reduce: bool = True  # also across replicas; False leaves a partial sum
    # called with each flat shard that is reduced over shards and replicas, before `Scaling.divide`
    hook: AllReduceHook | None = None
    hook_stream: Any = None  # where. Defaults to the stream of the last collective


@dataclass(frozen=True)
class Scaling:
    """How a sum over ranks becomes the requested gradient."""

    before: float  # each gradient is multiplied by this as it is copied
    op: Op  # of the reduce-scatter, and of the all-reduce over replicas
    divide: float | None  # the result is divided by this; None: it is complete


def scaling(options: ReduceOptions, dtype: torch.dtype, shards: int, replicas: int) -> Scaling:
    """The scaling of gradients that are reduced in `dtype`.

    fp16 overflows where a sum of many is taken, and underflows where it is divided first: half of each.
    """
    factor = options.divide_factor
    total = float(shards * replicas) if factor is None else float(factor)
    if dtype == torch.float16:
        before = 1.0
        while total / before > before:
            before *= 2
        return Scaling(1 / before, "sum", total / before)
    if factor is not None or options.force_sum:
        return Scaling(1.0, "sum", total)
    return Scaling(1.0, "avg", None)
