"""An optimizer that was built before `fully_shard` holds parameters that nobody trains: say so at its first step."""

import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ._model import original_name

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
    _seen[optimizer] = len(params)
