"""A copy of this rank's shards at one moment, also in the middle of a forward, without resharding."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ragged_shard import RaggedDTensor

from .. import _torch_compat as compat
from .._torch.tree import local_tensor

_TRIES = 3


@dataclass(frozen=True)
class Snapshot:
    """Copies that nothing writes to.

    Attributes:
        model: the model's state dict; sharded tensors are distributed ones around a copy of their shard.
        optimizer: the optimizer's state dict, or a list of those; None without an optimizer.
    """

    model: Mapping[str, Any]
    optimizer: Any


def snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    device: torch.device | str | None = None,
) -> Snapshot:
    """A consistent copy of a model's shards, and of optimizers' states, without resharding or communication.

    At any time at which no optimizer steps and nothing is loaded: between forward and backward, from a hook in the
    middle of a forward, from another thread while one runs. Gathered parameters stay gathered. Copies are made on the
    current stream, behind the work that it holds: if an optimizer runs on another stream, let this one wait for it.
    The result loads with `load_state_dict` and saves with `torch.distributed.checkpoint`.

    Args:
        model: sharded or not; not on meta.
        optimizer: one or several.
        device: of the copies, such as "cpu". Defaults to that of the shards.

    Raises:
        RuntimeError: parameters or states were written to while they were copied, three times over; or they are
            offloaded (`offload`).
        ValueError: a parameter on the meta device; by name.
    """
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())
    target = None if device is None else torch.device(device)
    written: list[str] = []
    for _ in range(_TRIES):
        tensors = dict(_tensors(_states(model, optimizers)))
        if empty := [name for name, tensor in tensors.items() if tensor.is_meta]:
            raise ValueError(f"snapshot: {empty[0]} is on meta; give it memory first (to_empty)")
        before = compat.versions(tensors.values())
        with torch.no_grad():
            copies = _copied(_states(model, optimizers), target)
        after = compat.versions(tensors.values())
        written = [name for name, old, new in zip(tensors, before, after, strict=True) if old != new]
        if not written:
            model_state, *states = copies.values()
            single = isinstance(optimizer, torch.optim.Optimizer)
            return Snapshot(model_state, None if optimizer is None else states[0] if single else states)
    raise RuntimeError(
        f"snapshot: {written[0]} was written to while it was copied, {_TRIES} times; take it while no optimizer steps"
    )


def _states(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    states = {f"optimizer {number}": optimizer.state_dict() for number, optimizer in enumerate(optimizers)}
    return {"model": dict(model.state_dict()), **states}


def _tensors(tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's part of every tensor in the tree, named by its keys."""
    if isinstance(tree, torch.Tensor):
        yield name, local_tensor(tree)
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _tensors(value, f"{name} {key}".lstrip())
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from _tensors(value, f"{name} {index}".lstrip())


def _copied(tree: Any, device: torch.device | None) -> Any:
    """The same tree with copies of its tensors, distributed as the originals."""
    if isinstance(tree, torch.Tensor):
        tensor = tree.detach()
        if isinstance(tensor, RaggedDTensor):
            return tensor.with_local(_copied(tensor.local, device))
        if isinstance(tensor, DTensor) or device is None:
            return tensor.clone()
        return tensor.to(device, copy=True)
    if isinstance(tree, dict):
        return {key: _copied(value, device) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_copied(value, device) for value in tree)
    return tree
