"""Tensors inside the containers that modules take and return."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Mapping
from types import MemberDescriptorType, ModuleType, NoneType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import PackedSequence

from ragged_shard import RaggedDTensor, distribute_like, redistribute
from ragged_shard.dist import DISTRIBUTED

_MOST_OBJECTS = 1000  # that `tensors_behind` looks into
_NO_ATTRIBUTES = (str, bytes, int, float, NoneType, torch.dtype, torch.device)


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """The same structure with `fn` applied to each tensor; containers in which nothing changed are kept as they are.

    Goes into tuples, named tuples, lists, mappings and dataclasses; leaves anything else alone. A container with a
    changed tensor is copied with its class and attributes, without running its constructor.

    Raises:
        TypeError: such a copy cannot be made; names the class.
    """
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    items = _items_of(tree)
    if items is None:
        return tree
    changed = {key: new for key, old in items if (new := map_tensors(fn, old)) is not old}
    return _with_items(tree, items, changed) if changed else tree


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Every tensor of the structure, in the order in which `map_tensors` comes to them."""
    tensors: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(keep, tree)
    return tensors


def tensors_behind(tree: Any) -> list[torch.Tensor]:
    """Tensors in attributes of objects in the structure that are no containers, such as torch's distributions."""
    tensors: list[torch.Tensor] = []
    seen: set[int] = set()
    waiting = [value for item in _leaves(tree) for value in _attributes_of(item)][::-1]
    while waiting and len(seen) < _MOST_OBJECTS:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            tensors.append(item)
        elif id(item) not in seen:
            seen.add(id(item))
            items = _items_of(item)
            waiting.extend(reversed(_attributes_of(item) if items is None else [value for _, value in items]))
    return tensors


def _leaves(tree: Any) -> list[Any]:
    """Everything in the structure that is neither a tensor nor a container; each container once."""
    leaves: list[Any] = []
    seen: set[int] = set()
    waiting = [tree]
    while waiting:
        item = waiting.pop()
        items = None if isinstance(item, torch.Tensor) else _items_of(item)
        if items is not None and id(item) not in seen:
            seen.add(id(item))
            waiting.extend(value for _, value in reversed(items))
        elif items is None and not isinstance(item, torch.Tensor):
            leaves.append(item)
    return leaves


def _attributes_of(item: Any) -> list[Any]:
    """Values of attributes, without running a user's properties or `__getattr__`."""
    if isinstance(item, (nn.Module, type, ModuleType, *_NO_ATTRIBUTES)):
        return []
    values = []
    with contextlib.suppress(AttributeError):
        values += object.__getattribute__(item, "__dict__").values()
    for cls in type(item).__mro__:
        for slot in vars(cls).values() if "__slots__" in vars(cls) else ():
            if isinstance(slot, MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # not set
                    values.append(slot.__get__(item))
    return values


def _items_of(tree: Any) -> list[tuple[Any, Any]] | None:
    """Items of a container, each with its key; None for anything that is no container."""
    if isinstance(tree, PackedSequence):  # torch wants its batch sizes on the CPU
        return [(index, item) for index, item in enumerate(tree) if item is not tree.batch_sizes]
    if isinstance(tree, (tuple, list)):
        return list(enumerate(tree))
    if isinstance(tree, Mapping):
        return list(tree.items())
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = (each.name for each in dataclasses.fields(tree))
        return [(name, getattr(tree, name)) for name in names if hasattr(tree, name)]
    return None


def _with_items(tree: Any, items: list[tuple[Any, Any]], changed: dict[Any, Any]) -> Any:
    """A copy of a container with other values under some keys."""
    if isinstance(tree, (tuple, list)):
        values = [changed.get(key, old) for key, old in enumerate(tree)]
        if type(tree) in (tuple, list):
            return type(tree)(values)
        if isinstance(tree, tuple):
            return _tuple_like(tree, values)
    try:
        copied = copy.copy(tree)
        if copied is tree:
            raise _not_copied(tree)
        if isinstance(tree, list):
            copied[:] = values
        elif isinstance(tree, Mapping):
            for key, value in changed.items():
                copied[key] = value
            attributes = getattr(copied, "__dict__", {})  # where a class shows its items as attributes too
            attributes.update({key: new for key, new in changed.items() if attributes.get(key) is tree[key]})
        else:
            for key, value in changed.items():
                object.__setattr__(copied, key, value)  # it may be frozen
    except Exception as error:
        raise _not_copied(tree) from error
    now, before = _items_of(copied), _items_of(tree)
    expected = [changed.get(key, old) for key, old in items]
    if not _same(before, [old for _, old in items]):  # the copy shares what it holds
        for key, old in items:
            tree[key] = old
        raise _not_copied(tree)
    if not _same(now, expected):
        raise _not_copied(tree)
    return copied


def _tuple_like(tree: Any, values: list[Any]) -> Any:
    """A tuple of the same class with other values."""
    if hasattr(tree, "n_fields"):  # of C, as `torch.max` returns: it has no other constructor
        return type(tree)(values)
    copied = tuple.__new__(type(tree), values)
    getattr(copied, "__dict__", {}).update(getattr(tree, "__dict__", {}))
    return copied


def _same(items: list[tuple[Any, Any]] | None, values: list[Any]) -> bool:
    return items is not None and [id(value) for _, value in items] == list(map(id, values))


def _not_copied(tree: Any) -> TypeError:
    return TypeError(
        f"{type(tree).__module__}.{type(tree).__qualname__} holds tensors that fully_shard moves, casts or marks, and "
        "copy.copy() does not make a copy that holds others. Pass them in a tuple, a dict or a dataclass"
    )


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
