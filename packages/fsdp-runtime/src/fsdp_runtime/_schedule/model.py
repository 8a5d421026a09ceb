"""Which unit a module, or a parameter, belongs to; and which units belong together.

Nothing is written onto parameters; a module carries its `Member`.
"""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from .._params.unit import Param, Unit, not_at_rest
from .passes import Pass

_ATTRIBUTE = "_fsdp_runtime_member"
_members: "weakref.WeakSet[Member]" = weakref.WeakSet()
# Parameters that were replaced by sharded ones: id -> (the parameter, its name there).
_originals: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}


class Member:
    """A unit and the model that it is part of: what hooks and the methods of `FSDPModule` act on.

    Attributes:
        unit: the unit.
        passes: shared with the other units of its model after `join`.
        registered: number of members that were ever registered.
        joined: the same, when `join` was called last.
    """

    registered: ClassVar[int] = 0

    def __init__(self, unit: Unit, passes: Pass) -> None:
        self.unit = unit
        self.passes = passes
        passes.units.append(unit)
        self.joined = -1

    def join(self) -> None:
        """Let all units inside this one share its model, under their names in it, if units were added since."""
        if self.joined == Member.registered:
            return
        self.joined = Member.registered
        for module in self.unit.modules:
            for name, inner in module.named_modules():
                member = member_of(inner)
                if member is None or member is self:
                    continue
                member.unit.become_inner(name if inner is member.unit.modules[0] else None)
                member._share(self.passes)
        if self.unit.root:
            followers: dict[Unit, list[Unit]] = {}
            for module in self.unit.modules:
                _find_followers(module, self.unit, False, followers)
            for host, units in followers.items():
                host.followers = tuple(units)
                for unit in units:
                    unit.host = host

    def _share(self, passes: Pass) -> None:
        if self.passes is not passes:
            self.passes.units.remove(self.unit)
            self.passes = passes
            passes.units.append(self.unit)


def _find_followers(
    module: nn.Module, host: Unit, skippable: bool, followers: dict[Unit, list[Unit]]
) -> None:
    """Add the units inside a module that ranks may skip, by the nearest unit around them that no rank skips.

    Args:
        host: that unit, for what is directly inside the module.
        skippable: whether the module is inside a unit that ranks may skip.
    """
    for child in module.children():
        member = member_of(child)
        if member is None:
            _find_followers(child, host, skippable, followers)
            continue
        unit, skipped = member.unit, skippable or member.unit.options.skippable
        if skipped and unit not in followers.setdefault(host, []):
            followers[host].append(unit)
        _find_followers(child, host if skipped else unit, skipped, followers)


def member_of(module: nn.Module) -> Member | None:
    """The member that `fully_shard` made of a module; None where it was not called on it."""
    found: Member | None = module.__dict__.get(_ATTRIBUTE)
    return found


def register(member: Member) -> None:
    """Note a new member on its modules."""
    Member.registered += 1
    _members.add(member)
    for module in member.unit.modules:
        module.__dict__[_ATTRIBUTE] = member


def owner_of(param: torch.Tensor) -> tuple[Member, Param] | None:
    """The unit that already shards this very (sharded) parameter."""
    for member in _members:
        for managed in member.unit.params:
            if managed.sharded is param or managed.unsharded is param:
                return member, managed
    return None


def gathered_names() -> dict[torch.Tensor, str]:
    """The names of all unsharded parameters, which modules hold while a pass is under way."""
    params = [param for member in _members for param in member.unit.params]
    return {param.unsharded: param.name for param in params if param.unsharded is not None}


def gathered_around(modules: Iterable[nn.Module]) -> list[Unit]:
    """Units that hold gathered memory and whose modules have one of these inside."""
    wanted, found = set(modules), []
    for unit in list(not_at_rest):
        for outer in unit.modules:
            if not wanted.isdisjoint(inner for inner in outer.modules() if inner is not outer):
                found.append(unit)
                break
    return found


def remember_original(param: torch.Tensor, name: str) -> None:
    """A parameter was replaced by a sharded one."""
    key = id(param)
    _originals[key] = (weakref.ref(param, partial(_originals.pop, key)), name)


def original_name(param: torch.Tensor) -> str | None:
    """The name of a parameter that was replaced by a sharded one; None for any other."""
    found = _originals.get(id(param))
    return found[1] if found is not None and found[0]() is param else None
