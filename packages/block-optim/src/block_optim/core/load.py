"""Fits saved or assigned states into those of an optimizer: each rank takes its elements, without communication."""

from typing import Any

import torch

from block_optim.core._torch_compat import local_of
from ragged_shard import DISTRIBUTED, distribute_like


def own_values(
    name: str, own: dict[str, Any], values: dict[str, Any], *, saved: bool = False
) -> dict[str, Any]:
    """Select this rank's elements of each entry of an assigned state or, with ``saved``, of a loaded one.

    Raises:
        ValueError: a key is missing (or, if loaded, too many), or a shape or placement differs; the parameter and the
            key are named.
    """
    if saved and set(values) != set(own):
        raise ValueError(
            f"{name}: the saved state has {sorted(values)}, this optimizer needs {sorted(own)}; states of another "
            "optimizer or format cannot be loaded"
        )
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
    if value.dtype in (torch.uint8, torch.int8) and target.is_floating_point():
        raise ValueError(
            f"{what} is {value.dtype}, expected {target.dtype}: 8-bit codes cannot be loaded as values"
        )
    if not isinstance(value, DISTRIBUTED):
        return local_of(distribute_like(value, target, src_data_rank=None))
    expected = tuple(target.placements) if isinstance(target, DISTRIBUTED) else "a plain tensor"
    if tuple(value.placements) != expected:
        raise ValueError(
            f"{what} has placements {tuple(value.placements)}, this optimizer's is {expected}; load it through "
            "torch.distributed.checkpoint, which fits any layout, or redistribute it"
        )
    return local_of(value)
