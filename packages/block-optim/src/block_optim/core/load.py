"""Copies saved states into those that an optimizer has, each rank its own elements, without communication."""

from typing import Any, NoReturn

import torch

from block_optim.core._torch_compat import DISTRIBUTED, local_of
from block_optim.core.holding import own_elements


def copy_state(name: str, own: dict[str, Any], saved: dict[str, Any], dry_run: bool) -> None:
    """Copy one parameter's saved state into its own; with ``dry_run`` only see whether it fits.

    Raises:
        ValueError: keys, shapes or placements differ; the parameter and the key are named.
    """
    if set(saved) != set(own):
        raise ValueError(
            f"{name}: the saved state has {sorted(saved)}, this optimizer needs {sorted(own)}; states of another "
            "optimizer or format cannot be loaded"
        )
    for key, value in saved.items():
        target = own[key]
        if not isinstance(target, torch.Tensor):
            if not dry_run:
                own[key] = value
            continue
        source = _own_elements(target, value, f"{name}: state {key!r}")
        if not dry_run:
            local_of(target).copy_(source)


def _own_elements(target: torch.Tensor, value: Any, what: str) -> torch.Tensor:
    """Those of ``value`` that belong into ``target``'s local tensor."""
    if not isinstance(value, torch.Tensor):
        value = torch.as_tensor(value)
    if tuple(value.shape) != tuple(target.shape):
        raise ValueError(f"{what} has shape {tuple(value.shape)}, expected {tuple(target.shape)}")
    if not isinstance(value, DISTRIBUTED):
        return own_elements(target, value) if isinstance(target, DISTRIBUTED) else value
    if not isinstance(target, DISTRIBUTED) or tuple(value.placements) != tuple(target.placements):
        _refuse(what, value, target)
    return local_of(value)


def _refuse(what: str, value: Any, target: torch.Tensor) -> NoReturn:
    lies = tuple(getattr(target, "placements", ())) or "a plain tensor"
    raise ValueError(
        f"{what} lies as {tuple(value.placements)}, this optimizer's as {lies}; load it through "
        "torch.distributed.checkpoint, which fits any layout, or redistribute it"
    )
