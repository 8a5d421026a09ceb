"""Tensors inside the containers that modules take and return."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ragged_shard import RaggedDTensor, distribute_like, redistribute
from ragged_shard.dist import DISTRIBUTED


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """The same structure with `fn` applied to each tensor; containers in which nothing changed are kept as they are.

    Goes into tuples, named tuples, lists, mappings and dataclasses (mappings and dataclasses keep their class);
    anything else is left alone.
    """
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, (tuple, list)):
        items: list[Any] = []
        same = True
        for old in tree:
            new = fn(old) if isinstance(old, torch.Tensor) else map_tensors(fn, old)
            same = same and new is old
            items.append(new)
        if same:
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, Mapping):
        if not tree:
            return tree
        changed = {key: new for key, old in tree.items() if (new := map_tensors(fn, old)) is not old}
        return _replace_items(tree, changed) if changed else tree
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree) if field.init}
        changed = {name: new for name, old in fields.items() if (new := map_tensors(fn, old)) is not old}
        return dataclasses.replace(tree, **changed) if changed else tree
    return tree


def _replace_items(tree: Any, changed: dict[Any, Any]) -> Any:
    if dataclasses.is_dataclass(tree):  # an output class that is both: attributes and items must agree
        return dataclasses.replace(tree, **changed)  # type: ignore[type-var]
    copied = tree.copy() if hasattr(tree, "copy") else dict(tree)
    if isinstance(tree, dict) and type(copied) is not type(tree):  # `dict.copy` makes a dict of any subclass
        copied = copy.copy(tree)
    copied.update(changed)
    attributes = getattr(copied, "__dict__", {})  # where a subclass shows its items as attributes too
    attributes.update({key: new for key, new in changed.items() if attributes.get(key) is tree[key]})
    return copied


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Every tensor of the structure, in order."""
    leaves: list[torch.Tensor] = []
    waiting = [tree]
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            leaves.append(item)
        elif isinstance(item, (tuple, list)):
            waiting.extend(reversed(item))
        elif isinstance(item, Mapping):
            waiting.extend(reversed(list(item.values())))
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            waiting.extend(getattr(item, field.name) for field in reversed(dataclasses.fields(item)))
    return leaves


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a distributed tensor; other tensors themselves."""
    local = tensor.local if isinstance(tensor, RaggedDTensor) else tensor
    return local.to_local() if isinstance(local, DTensor) else local


def local_like(like: Any, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole or distributed value, cut as a distributed tensor is; redistributes if it must."""
    if not isinstance(value, DISTRIBUTED):
        value = distribute_like(value.detach(), like, src_data_rank=None)
    elif value.placements != like.placements:
        value = redistribute(value, placements=like.placements)
    return local_tensor(value)


def cast_to(dtype: torch.dtype | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that casts floating-point tensors to `dtype` and leaves others; None: leaves all."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if dtype is None or not tensor.is_floating_point() or tensor.dtype == dtype:
            return tensor
        return tensor.to(dtype)

    return cast
