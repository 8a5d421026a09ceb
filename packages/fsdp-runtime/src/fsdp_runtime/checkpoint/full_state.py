"""Loads full state dicts of a model and its optimizers: whole, plain tensors, from rank 0 or from all ranks.

`ragged_shard` moves them tensor by tensor, also the other way; here parameters on the meta device get memory first.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ragged_shard.state_dict
from ragged_shard.dist import gather_from_ranks, on_all_ranks
from ragged_shard.state_dict import Optimizers, check_full_tensor

from .._params.empty_buffers import is_empty
from .targets import adopt_assigned, buffers_without_values, device_of, give_memory, targets_of, units_of


def set_full_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], *, rank0_only: bool = False, strict: bool = True
) -> None:
    """Load whole tensors into a model, sharded or not, on meta or not; every rank calls it.

    Tensor by tensor, cast to the model's dtypes but not between floating point and integers. Each rank copies its
    ranges out of its own state dict and communicates only a few bytes; with `rank0_only` rank 0 sends each byte to the
    ranks that hold it, and values of buffers that no state dict has (`persistent=False`) where another rank has none.
    All names and shapes are checked first: if one is wrong nothing is changed. Parameters that were on meta are other
    objects afterwards: build optimizers then.

    Args:
        model: the same on every rank.
        state_dict: name -> whole tensor; with `rank0_only` anything on other ranks.
        rank0_only: only rank 0 has it.
        strict: names must be exactly the model's, and no buffer may be left without values: compute those that no state
            dict has first. False: load common names; parameters on meta must be there.

    Raises:
        ValueError: missing or unexpected names, a wrong shape, different values for a tied parameter, a mesh that does
            not begin at rank 0 (`rank0_only`); on every rank.
        TypeError: a value that is not a plain tensor, or floating point for integers (or the reverse).
    """
    adopt_assigned(model)
    with on_all_ranks("set_full_state_dict"):
        if not rank0_only or not dist.is_initialized() or dist.get_rank() == 0:
            _check(model, state_dict, strict)
    with on_all_ranks("set_full_state_dict"):
        give_memory(model)
    ragged_shard.state_dict.load_full_state_dict(model, state_dict, rank0_only=rank0_only, strict=strict)
    if rank0_only and dist.is_initialized():
        _send_buffers(model)


def _send_buffers(model: nn.Module) -> None:
    """Send rank 0's values of the buffers that are in no state dict, where another rank has none. Collective."""
    places: dict[str, tuple[dict[str, Any], str]] = {}
    for prefix, module in model.named_modules():
        for name in sorted(module._non_persistent_buffers_set):
            if module._buffers.get(name) is not None:
                places[f"{prefix}.{name}"] = (module._buffers, name)
    if not places:
        return
    own = [key for key, (slots, name) in places.items() if slots[name].is_meta or is_empty(slots[name])]
    of_rank0, *others = gather_from_ranks(own)
    sent = [key for key in places if key not in of_rank0 and any(key in missing for missing in others)]
    carrier, device = nn.Module(), device_of(model)
    for number, key in enumerate(sent):
        slots, name = places[key]
        if slots[name].is_meta:
            slots[name] = torch.empty_like(slots[name], device=device)
        carrier.register_buffer(str(number), slots[name])
    values = carrier.state_dict() if dist.get_rank() == 0 else {}
    ragged_shard.state_dict.load_full_state_dict(carrier, values, rank0_only=True)


def _check(model: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> None:
    known: set[str] = set()
    for target in targets_of(model):
        names = (target.name, *target.also)
        known.update(names)
        present = [name for name in names if name in state_dict]
        for name in present:
            check_full_tensor(name, target.tensor, state_dict[name])
        for name in present[1:]:
            first, value = state_dict[present[0]], state_dict[name]
            if not torch.allclose(first, value.to(first), rtol=0, atol=0, equal_nan=True):
                raise ValueError(f"{present[0]} and {name} are one parameter, and have different values")
        if len(present) < len(names) and (strict or (target.tensor.is_meta and not present)):
            missing = next(name for name in names if name not in state_dict)
            raise ValueError(f"{missing} is missing from the state dict")
    if strict and (empty := buffers_without_values(model, state_dict)):
        raise ValueError(
            f"buffers {empty} have no values, and the state dict has none; compute them first, or pass strict=False"
        )
    if strict and (unexpected := sorted(state_dict.keys() - known)):
        raise ValueError(f"{unexpected[0]} of the state dict is not in the model ({len(unexpected)} such)")


def get_full_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, *, rank0_only: bool = False, cpu_offload: bool = False
) -> dict[str, Any]:
    """States of optimizers by parameter name, as `ragged_shard.state_dict.full_optimizer_state_dict`.

    Gathered units are resharded first: torch takes the names of an optimizer's parameters from the modules.
    """
    _reshard(model)
    return ragged_shard.state_dict.full_optimizer_state_dict(
        model, optimizers, rank0_only=rank0_only, cpu_offload=cpu_offload
    )


def _reshard(model: nn.Module) -> None:
    for unit in units_of(model):
        unit.reshard()


def set_full_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, state_dict: Mapping[str, Any], *, rank0_only: bool = False
) -> None:
    """Load the result of `get_full_optimizer_state_dict`, as `set_full_state_dict` loads weights.

    Gathered units are resharded first. An optimizer without states makes them by a step with a learning rate of zero
    (torch's way). Frozen parameters get their saved states too, which torch's functions drop.

    Raises:
        ValueError, TypeError: states of other parameters, or of another kind, by name; on every rank. Without
            `rank0_only` ranks whose states fit have loaded them.
    """
    _reshard(model)
    load = ragged_shard.state_dict.load_full_optimizer_state_dict
    with nullcontext() if rank0_only else on_all_ranks("set_full_optimizer_state_dict"):
        load(model, optimizers, state_dict, rank0_only=rank0_only)  # rank0_only: raises on all ranks
