"""`--memory-budget`: a first step that takes the least memory, then `fsdp_runtime.tune`."""

import argparse
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_runtime import BudgetError, FSDPModule, StepMeter, Tuning, tune

from .errors import TrainError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def parse_bytes(text: str) -> int:
    """Bytes of "8GiB", "500MB" or "123456".

    Raises:
        argparse.ArgumentTypeError: anything else, and what is less than one byte.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)?", text.strip(), re.IGNORECASE)
    if not found or (nbytes := int(float(found[1]) * _UNITS[(found[2] or "").upper()])) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected bytes, such as 8GiB, 500MB or 123456789")
    return nbytes


def use_least_memory(model: nn.Module) -> None:
    """Free every unit after forward, and gather none ahead."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(True, recurse=False)
            module.set_prefetch_depth(0)


def choose(
    model: nn.Module, step: Callable[[], Any], budget: int, meter: StepMeter, device: torch.device
) -> Tuning:
    """Keep as many units gathered between forward and backward as the budget allows. Collective.

    Args:
        model: a root that fsdp_runtime has sharded, whose optimizer has its states.
        step: forward and backward.
        budget: bytes that a rank may hold.
        meter: has measured a whole step with the least memory, the optimizer's included, on this rank.
        device: of the model.

    Raises:
        TrainError: on every rank, where the budget is too small; says what is possible.
    """
    taken = torch.tensor(float(meter.peak or 0), dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(taken, dist.ReduceOp.MAX)
    least = int(taken)  # so much the optimizer's step may need
    try:
        tuning = tune(model, step, memory_budget=budget, meter=meter)
    except BudgetError as error:
        least = max(least, error.least)
    except ValueError as error:
        raise TrainError(f"--memory-budget: {error}") from error
    if least > budget:
        raise TrainError(
            f"--memory-budget {budget:,}: a step takes at least {least:,} bytes on the rank that needs most, with "
            "every unit freed after forward and none gathered ahead"
        )
    return tuning


def describe(tuning: Tuning, model: nn.Module, budget: int) -> str:
    """What was chosen, in a line."""
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    return (
        f"{len(tuning.kept)} of {units} units stay gathered between forward and backward, {tuning.prefetch_depth} "
        f"gathered ahead: at most {tuning.peak / 1e6:,.2f} of {budget / 1e6:,.2f} MB"
    )
