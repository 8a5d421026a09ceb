"""Which unit a module, or a parameter, belongs to; and which units belong together.

Nothing is written onto parameters; a module carries its unit.
"""

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from ._param import ManagedParam
    from ._unit import Unit

_ATTRIBUTE = "_fsdp_runtime_unit"
_units: "weakref.WeakSet[Unit]" = weakref.WeakSet()
_version = 0  # of the structure: how many units were ever made
# Parameters that were replaced by sharded ones: id -> (the parameter, its name there).
_originals: "dict[int, tuple[weakref.ref[torch.Tensor], str]]" = {}


def unit_of(module: nn.Module) -> "Unit | None":
    """The unit that `fully_shard` made of a module; None where it was not called on it."""
    found: Any = module.__dict__.get(_ATTRIBUTE)
    return found  # type: ignore[no-any-return]


def register(unit: "Unit") -> None:
    """Note a new unit on its modules."""
    global _version
    _version += 1
    _units.add(unit)
    for module in unit.modules:
        module.__dict__[_ATTRIBUTE] = unit


def owner_of(param: torch.Tensor) -> "tuple[Unit, ManagedParam] | None":
    """The unit that already shards this very (sharded) parameter."""
    for unit in _units:
        for managed in unit.params:
            if managed.sharded is param or managed.unsharded is param:
                return unit, managed
    return None


def units_around(modules: tuple[nn.Module, ...]) -> "list[Unit]":
    """Units whose modules have one of these inside."""
    wanted = set(modules)
    return [
        unit
        for unit in _units
        if any(inner in wanted and inner is not outer for outer in unit.modules for inner in outer.modules())
    ]


def join(root: "Unit") -> None:
    """Give all units inside a root its context, and their names in it. Cheap where nothing was added since."""
    context = root.context
    if context.joined == _version:
        return
    context.joined = _version
    for module in root.modules:
        for name, inner in module.named_modules():
            unit = unit_of(inner)
            if unit is None or unit is root:
                continue
            unit.root = False
            if inner is unit.modules[0]:
                unit.rename(name)
            if unit.context is not context:
                unit.context.units.remove(unit)
                unit.context = context
                context.units.append(unit)


def remember_original(param: torch.Tensor, name: str) -> None:
    """A parameter was replaced by a sharded one."""
    key = id(param)

    def forget(_: Any) -> None:
        _originals.pop(key, None)

    _originals[key] = (weakref.ref(param, forget), name)


def original_name(param: torch.Tensor) -> str | None:
    """The name of a parameter that was replaced by a sharded one; None for any other."""
    found = _originals.get(id(param))
    return found[1] if found is not None and found[0]() is param else None
