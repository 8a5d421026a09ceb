"""Weights narrower than fp32: every step computes with fp32 copies of them and rounds once, when it writes them back.

    option                     how it is rounded
    -------------------------  --------------------------------------------------------------
    none                       to nearest: small changes of weights are lost
    stochastic_rounding, seed  up or down at random, right on average; bf16 weights only

fp32 weights that are computed with in bf16 (`MixedPrecisionPolicy`) lose nothing. Nothing here communicates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from block_optim.core.options import check_flag
from block_optim.core.params import Group, Param
from block_optim.core.rounding import CHUNK, Rounder


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether weights of this dtype are worked on in fp32 copies."""
    return dtype.itemsize < 4


def check_precision(group: Group, params: Sequence[Param]) -> None:
    """Raise ValueError if a group's options of rounding do not fit a parameter, which is named."""
    check_flag("stochastic_rounding", group["stochastic_rounding"])
    if isinstance(group["seed"], bool) or not isinstance(group["seed"], int):
        raise ValueError(f"seed={group['seed']!r}: expected an integer")
    for param in params if group["stochastic_rounding"] else ():
        if not is_narrow(param.dtype):
            continue
        if param.dtype != torch.bfloat16:
            raise ValueError(
                f"{param.name}: stochastic_rounding is for bf16 parameters, this one is {param.dtype}; round to "
                "nearest in its group"
            )
        if not param.holding.in_runs or not param.local.is_contiguous():
            raise ValueError(
                f"{param.name}: stochastic_rounding needs what a rank holds to be one contiguous run of the tensor, it "
                f"has placements {param.placements} and stride {param.local.stride()}; round to nearest in its group"
            )


@dataclass(frozen=True)
class Origin:
    """Key of the random bits of a stretch: a parameter, a seed, and the stretch's first element."""

    name: str
    seed: int
    element: int


def origin_of(param: Param) -> Origin | None:
    """Origin of a parameter that is rounded stochastically; None for others."""
    if not param.group.get("stochastic_rounding") or param.dtype != torch.bfloat16:
        return None
    assert param.start is not None
    return Origin(param.name, param.group["seed"], param.start)


class NarrowWriter:
    """Writes fp32 copies back into narrow weights, rounded by the options of each parameter's group."""

    def __init__(self) -> None:
        self._rounders: dict[torch.device, Rounder] = {}

    def __call__(self, param: Param, wide: torch.Tensor, weight: torch.Tensor, first: int, step: int) -> None:
        """Round ``wide`` (1-D, lost) into ``weight``: elements from ``first`` on of what this rank holds."""
        origin = origin_of(param)
        if origin is None:
            weight.copy_(wide)
            return
        if weight.device not in self._rounders:
            self._rounders[weight.device] = Rounder(CHUNK, weight.device)
        rounder = self._rounders[weight.device]
        rounder(wide, weight, origin.seed, origin.name, step, origin.element + first)
