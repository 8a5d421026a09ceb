"""Optimizers' steps: raises before one that would not train its parameters, and counts the others as writes.

The first step refuses parameters from before `fully_shard`, gathered parameters, and weights that are kept as codes.

After a step gathered values are out of date on every rank. Torch's count of writes does not tell that alone: an
optimizer may skip what has no elements on a rank, or write through pointers.
"""

import weakref
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .._params.unit import not_at_rest
from .._plan.param import managed_of

_seen: "weakref.WeakKeyDictionary[Optimizer, int]" = weakref.WeakKeyDictionary()


@cache
def watch() -> None:
    """Look at every step of every optimizer of this process."""
    register_optimizer_step_pre_hook(_check)
    register_optimizer_step_post_hook(_count_writes)


def _count_writes(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not not_at_rest:
        return
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    for unit in not_at_rest:
        for group in unit.groups:
            if group.buffer is not None and any(id(param.sharded) in stepped for param in group.params):
                torch.autograd.graph.increment_version(group.buffer.shard)


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if _seen.get(optimizer) == len(params):
        return
    managed = [(param, member) for param in params if (member := managed_of(param)) is not None]
    stale = [of.name for param, of in managed if param is not of.sharded and param is not of.unsharded]
    if stale:
        raise RuntimeError(
            f"{type(optimizer).__name__} was built before fully_shard: {len(stale)} of its {len(params)} parameters, "
            f"{stale[0]!r} first, were replaced by sharded ones and would never be trained. "
            "Build the optimizer after fully_shard, from model.parameters(); a module that still holds one is tied to "
            "a unit that is not around it: call fully_shard on the model too"
        )
    if gathered := [of.name for param, of in managed if param is of.unsharded]:
        raise RuntimeError(
            f"{type(optimizer).__name__} was built between forward and backward: {len(gathered)} of its {len(params)} "
            f"parameters, {gathered[0]!r} first, are gathered values that are not trained. Build the optimizer before "
            "forward, or call reshard() first"
        )
    if untrained := [of.name for _, of in managed if not of.group.trained]:
        raise RuntimeError(
            f"{type(optimizer).__name__} was given {len(untrained)} weights that are kept as codes "
            f"(QuantizationPolicy.at_rest), {untrained[0]!r} first; they are not trained. "
            "Build it from the parameters that require a gradient"
        )
    _seen[optimizer] = len(params)
