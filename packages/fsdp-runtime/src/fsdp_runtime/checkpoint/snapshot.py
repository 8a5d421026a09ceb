"""A copy of this rank's shards at one moment, also in the middle of a forward, without resharding."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer import BlockQuantizedTensor
from ragged_shard import RaggedDTensor

from .. import _torch_compat as compat
from .._params.at_rest import CODES, SCALES, entries_of, is_at_rest
from .._params.group import Group
from .._plan.group import wrap_local
from .._torch.tree import local_tensor
from .entries import CHECKPOINTED
from .targets import units_of

_TRIES = 3


@dataclass(frozen=True)
class Snapshot:
    """Copies that nothing writes to.

    Attributes:
        model: as the model's state dict: what is sharded as distributed tensors, each with a copy of its shard.
        optimizer: as the optimizer's state dict, or a list of those; None: none was given.
    """

    model: Mapping[str, torch.Tensor]
    optimizer: Any


def snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    device: torch.device | str | None = None,
) -> Snapshot:
    """A consistent copy of a model's shards, and of optimizers' states, without resharding or communication.

    At any time at which no optimizer steps and nothing is loaded: between forward and backward, from a hook in the
    middle of a forward, from another thread while one runs. Gathered parameters stay gathered. One copy for each
    group's shard, on the current stream, behind the work that it holds: where an optimizer runs on another stream, let
    this one wait for it. What is returned loads with `load_state_dict` and saves with `torch.distributed.checkpoint`.

    Args:
        model: sharded or not; not on meta.
        optimizer: one or several.
        device: of the copies, such as "cpu". Defaults to where the shards are.

    Raises:
        RuntimeError: parameters or states were written to while they were copied, three times over; or they are
            offloaded (`offload`).
        ValueError: a parameter on the meta device, or one that was moved or assigned since the last forward; by name.
    """
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())
    where = None if device is None else torch.device(device)
    written: list[str] = []
    for _ in range(_TRIES):
        held = dict(_held(model, optimizers))
        before = compat.versions(held.values())
        with torch.no_grad():
            taken = Snapshot(_model(model, where), _states(optimizer, optimizers, where))
        after = compat.versions(held.values())
        written = [name for name, one, two in zip(held, before, after, strict=True) if one != two]
        if not written:
            return taken
    raise RuntimeError(
        f"snapshot: {written[0]} was written to while it was copied, {_TRIES} times; take it while no optimizer steps"
    )


def _held(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Iterator[tuple[str, torch.Tensor]]:
    """What is copied, under names for errors."""
    for unit in units_of(model):
        unit.check_open()
        for group in unit.groups:
            if group.buffer is None or group.has_moved():
                names = [param.name for param in group.params]
                raise ValueError(
                    f"snapshot: parameters {names} of {group.name} are on meta, or were moved or assigned; run a "
                    "forward first, or use state_dict()"
                )
            yield from ((f"{group.name}[{i}]", flat) for i, flat in enumerate(group.buffer.shard))
    for module_name, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{module_name}.{name}", local_tensor(buffer)
    for number, one in enumerate(optimizers):
        for index, state in enumerate(list(one.state.values())):
            yield from ((f"optimizer {number}, state {index}, {key}", t) for key, t in _tensors(state))


def _tensors(tree: Any, key: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield key, local_tensor(tree)
    elif isinstance(tree, Mapping):
        for name, value in list(tree.items()):
            yield from _tensors(value, f"{key} {name}")
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from _tensors(value, f"{key} {index}")


def _copy(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """A copy with memory of its own, distributed as the original."""
    tensor = tensor.detach()
    if isinstance(tensor, RaggedDTensor):
        return tensor.with_local(_copy(tensor.local, device))
    if isinstance(tensor, DTensor) or device is None:
        return tensor.clone()
    return tensor.to(device, copy=True)


def _model(model: nn.Module, device: torch.device | None) -> dict[str, torch.Tensor]:
    """The state dict, from the parameters' groups: modules may hold unsharded ones."""
    known: dict[tuple[int, str], torch.Tensor] = {}
    for unit in units_of(model):
        for group in unit.groups:
            copies = _copies_of(group, device)
            for param, copy in zip(group.params, copies, strict=True):
                for place in param.places:
                    known[id(place.module), place.attribute] = copy
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        prefix = f"{prefix}.".replace(CHECKPOINTED, "").removesuffix(".")
        for name, value in list(module._parameters.items()) + list(module._buffers.items()):
            if value is None or name in module._non_persistent_buffers_set:
                continue
            key = f"{prefix}.{name}" if prefix else name
            found.update(_entries(key, known.get((id(module), name)), value, device))
    return found


def _entries(
    key: str, copied: torch.Tensor | None, value: torch.Tensor, device: torch.device | None
) -> dict[str, torch.Tensor]:
    if copied is None:
        return {key: _copy(value, device)}
    if is_at_rest(copied):
        codes, scales = entries_of(copied)
        return {key + CODES: codes, key + SCALES: scales}
    return {key: copied}


def _copies_of(group: Group, device: torch.device | None) -> Iterator[torch.Tensor]:
    """The sharded parameters of a group around one copy of its memory."""
    assert group.buffer is not None
    flats = [_copy(flat, device) for flat in group.buffer.shard]
    slices = group.plan.geometry.slices
    for param, plan in zip(group.params, group.plan.params, strict=True):
        local = param.local
        if isinstance(local, BlockQuantizedTensor):
            yield wrap_local(plan, local.around(_copy(local.codes, device), _copy(local.scales, device)))
            continue
        found = slices[param.name]
        view = flats[found.segment].narrow(0, found.begin, found.local_numel).view(found.local_shape)
        yield wrap_local(plan, param.extended(view))


def _states(given: Any, optimizers: list[torch.optim.Optimizer], device: torch.device | None) -> Any:
    if given is None:
        return None
    found = [_copied(one.state_dict(), device) for one in optimizers]
    return found[0] if isinstance(given, torch.optim.Optimizer) else found


def _copied(tree: Any, device: torch.device | None) -> Any:
    if isinstance(tree, torch.Tensor):
        return _copy(tree, device)
    if isinstance(tree, dict):
        return {key: _copied(value, device) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_copied(value, device) for value in tree)
    return tree
