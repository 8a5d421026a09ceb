"""An optimizer that holds parameters that nobody trains: say so at its first step.

Those of before `fully_shard`, where it was built before; gathered ones; and weights that are kept as codes.
"""

import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._params.kinds.at_rest import refuse_coded
from .._schedule.model import gathered_names, original_name

_seen: "weakref.WeakKeyDictionary[Optimizer, int]" = weakref.WeakKeyDictionary()
_watching = False


def watch() -> None:
    """Look at every optimizer of this process before its first step, and after parameters were added to it."""
    global _watching
    if not _watching:
        _watching = True
        register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if _seen.get(optimizer) == len(params):
        return
    stale = [name for param in params if (name := original_name(param)) is not None]
    if stale:
        raise RuntimeError(
            f"{type(optimizer).__name__} was built before fully_shard: {len(stale)} of its {len(params)} parameters, "
            f"{stale[0]!r} first, were replaced by sharded ones and would never be trained. "
            "Build the optimizer after fully_shard, from model.parameters()"
        )
    gathered = gathered_names()
    if held := [name for param in params if (name := gathered.get(param)) is not None]:
        raise RuntimeError(
            f"{type(optimizer).__name__} was built between forward and backward: {len(held)} of its {len(params)} "
            f"parameters, {held[0]!r} first, are gathered values that are not trained. Build the optimizer before "
            "forward, or call reshard() first"
        )
    refuse_coded(optimizer, params)
    _seen[optimizer] = len(params)
