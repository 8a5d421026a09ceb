"""Weights narrower than fp32: every step computes with fp32 copies of them and rounds once, when it writes them back.

    option                     the fp32 copy                         how it is rounded
    -------------------------  ------------------------------------  --------------------------------------------
    none                       made in the step                      to nearest: small changes of weights are lost
    stochastic_rounding, seed  made in the step; bf16 weights only   up or down at random, right on average
    master_weights             a state, ``master_param``, 4 bytes    to nearest: nothing is lost, the copy keeps it
                               a weight; what `Param.local` is

fp32 weights need neither: a step is the same with and without. With masters a run has the states and masters of a run
of fp32 weights that gets the same gradients. Elements that something else than a step has written (a loaded model,
`qk_clip_`) are taken over into the masters by the next step. Nothing here communicates.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from block_optim.core._torch_compat import local_of
from block_optim.core.options import check_flag
from block_optim.core.params import Group, Param
from block_optim.core.rounding import CHUNK, Rounder
from block_optim.core.runs import FlatSpace

MASTER = "master_param"  # the state's name
CHOICES = ("stochastic_rounding", "master_weights")


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether weights of this dtype are worked on in fp32 copies."""
    return dtype.itemsize < 4


def check_precision(group: Group, params: Sequence[Param]) -> None:
    """Raise ValueError if a group's choices do not fit each other or a parameter, which is named."""
    for choice in CHOICES:
        check_flag(choice, group[choice])
    if all(group[choice] for choice in CHOICES):
        raise ValueError(
            "stochastic_rounding=True with master_weights=True: masters keep what rounding would lose; choose one"
        )
    if isinstance(group["seed"], bool) or not isinstance(group["seed"], int):
        raise ValueError(f"seed={group['seed']!r}: expected an integer")
    for param in params if group["stochastic_rounding"] else ():
        if not is_narrow(param.dtype):
            continue
        if param.dtype != torch.bfloat16:
            raise ValueError(
                f"{param.name}: stochastic_rounding is for bf16 parameters, this one is {param.dtype}; use "
                "master_weights=True in its group"
            )
        if not param.holding.in_runs or not param.local.is_contiguous():
            raise ValueError(
                f"{param.name}: stochastic_rounding needs what a rank holds to be one contiguous run of the tensor, it "
                f"has placements {param.placements} and stride {param.local.stride()}; round to nearest in its group"
            )


# ---------------------------------------------------------------- masters


def make_masters(params: Sequence[Param]) -> None:
    """Give narrow parameters fp32 copies, neighbours where they are."""
    narrow = [p for p in params if is_narrow(p.dtype)]
    for device in dict.fromkeys(p.device for p in narrow):
        chosen = [p for p in narrow if p.device == device]
        weights = [local_of(p.tensor).detach() for p in chosen]
        space = FlatSpace(weights)
        masters = space.views(space.zeros(torch.float32, device))
        for param, weight, master in zip(chosen, weights, masters, strict=True):
            param.master = master.copy_(weight)


def refresh_masters(params: Iterable[Param]) -> None:
    """Refresh masters from parameters that were modified outside `step` (by loading, `qk_clip_` or EMA)."""
    for param in params:
        master, weight = param.local, local_of(param.tensor).detach()
        master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight.float()))


def store_masters(params: Iterable[Param]) -> None:
    """Round the masters into the parameters."""
    for param in params:
        local_of(param.tensor).detach().copy_(param.local)


# ---------------------------------------------------------------- stochastic rounding


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
