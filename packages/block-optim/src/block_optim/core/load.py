"""Fits saved or assigned states into those of an optimizer: each rank takes its elements, without communication."""

from typing import Any, NoReturn

import torch

from block_optim.core._torch_compat import DISTRIBUTED, local_of
from ragged_shard import distribute_like


def check_keys(name: str, own: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raise ValueError, naming the parameter, unless a saved state has the keys of this optimizer's."""
    if set(saved) != set(own):
        raise ValueError(
            f"{name}: the saved state has {sorted(saved)}, this optimizer needs {sorted(own)}; states of another "
            "optimizer or format cannot be loaded"
        )


def own_values(name: str, own: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Select this rank's elements of each entry of a loaded or assigned state.

    Raises:
        ValueError: a key is missing, or a shape or placement differs; the parameter and the key are named.
    """
    if missing := sorted(set(own) - set(values)):
        raise ValueError(
            f"{name}: its state has no {', '.join(map(repr, missing))} any more, this optimizer needs {sorted(own)}; "
            "remove all of it to begin again, or none"
        )
    return {
        key: _own_elements(value, values[key], f"{name}: state {key!r}")
        if isinstance(value, torch.Tensor)
        else values[key]
        for key, value in own.items()
    }


def put_values(own: dict[str, Any], values: dict[str, Any]) -> None:
    """Copy the result of `own_values` into a state."""
    for key, value in values.items():
        if isinstance(own[key], torch.Tensor):
            local_of(own[key]).copy_(value)
        else:
            own[key] = value


def _own_elements(target: torch.Tensor, value: Any, what: str) -> torch.Tensor:
    """The elements of ``value`` for ``target``'s local tensor."""
    if value is target:
        return local_of(value)
    if not isinstance(value, torch.Tensor):
        value = torch.as_tensor(value)
    if tuple(value.shape) != tuple(target.shape):
        raise ValueError(f"{what} has shape {tuple(value.shape)}, expected {tuple(target.shape)}")
    if not isinstance(value, DISTRIBUTED):
        return local_of(distribute_like(value, target, src_data_rank=None))
    if not isinstance(target, DISTRIBUTED) or tuple(value.placements) != tuple(target.placements):
        _refuse(what, value, target)
    return local_of(value)


def _refuse(what: str, value: Any, target: torch.Tensor) -> NoReturn:
    layout = tuple(getattr(target, "placements", ())) or "a plain tensor"
    raise ValueError(
        f"{what} has placements {tuple(value.placements)}, this optimizer's is {layout}; load it through "
        "torch.distributed.checkpoint, which fits any layout, or redistribute it"
    )
