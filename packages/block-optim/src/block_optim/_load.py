"""Copies saved states into the ones that an optimizer has, part by part, without communication."""

from typing import Any

import torch

from block_optim._torch_compat import DISTRIBUTED, local_of


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
        source = _part_for(target, value, f"{name}: state {key!r}")
        if not dry_run:
            local_of(target).copy_(source)


def _part_for(target: torch.Tensor, value: Any, what: str) -> torch.Tensor:
    """What of ``value`` belongs into ``target``'s local part."""
    if not isinstance(value, torch.Tensor):
        value = torch.as_tensor(value)
    if tuple(value.shape) != tuple(target.shape):
        raise ValueError(f"{what} has shape {tuple(value.shape)}, expected {tuple(target.shape)}")
    if not isinstance(target, DISTRIBUTED):
        return local_of(value) if not isinstance(value, DISTRIBUTED) else _refuse(what, value, target)
    if not isinstance(value, DISTRIBUTED):
        return _own_part(target, value)
    if tuple(value.placements) != tuple(target.placements):
        return _refuse(what, value, target)
    return local_of(value)


def _refuse(what: str, value: Any, target: torch.Tensor) -> torch.Tensor:
    lies = tuple(getattr(target, "placements", ())) or "a plain tensor"
    raise ValueError(
        f"{what} lies as {tuple(value.placements)}, this optimizer's as {lies}; load it through "
        "torch.distributed.checkpoint, which fits any layout, or redistribute it"
    )


def _own_part(target: Any, full: torch.Tensor) -> torch.Tensor:
    """This rank's part of a full tensor, in the shape of ``target``'s local part."""
    pieces = []
    for chunk in target.__create_chunk_list__():
        index = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
        pieces.append(full[index].reshape(-1))
    local = local_of(target)
    return torch.cat(pieces).view(local.shape) if pieces else full.new_empty(local.shape)
