"""The unit of a module or a parameter, and the units of a model.

Nothing is written onto parameters; a module carries its `Member`.
"""

import logging
from collections.abc import Sequence

from torch import nn

from ragged_shard import RaggedDTensor

from .._params.unit import Param, Unit
from .._plan.param import Place, managed_of
from .passes import Pass, model_in_forward

_log = logging.getLogger(__name__)
_ATTRIBUTE = "_fsdp_runtime_member"


class Member:
    """A unit and the model that it is part of; hooks and the methods of `FSDPModule` act on it."""

    def __init__(self, unit: Unit, passes: Pass) -> None:
        self.unit = unit
        self.passes = passes  # shared with the other units of its model
        passes.units.append(unit)
        self._checked = False  # whether its ties are known
        # Parameters that its modules use and a unit around holds: name, parameter, that unit.
        self._outside: list[tuple[str, Param, Unit]] = []

    def join(self) -> None:
        """Let all units inside this new one, the outermost, share its model, under their names in it."""
        for module in self.unit.modules:
            for name, inner in module.named_modules():
                member = member_of(inner)
                if member is None or member is self:
                    continue
                member.unit.become_inner(name if inner is member.unit.modules[0] else None)
                if member.passes is not self.passes:
                    member.passes.units.remove(member.unit)
                    member.passes = self.passes
                    self.passes.units.append(member.unit)
        followers: dict[Unit, list[Unit]] = {}
        for module in self.unit.modules:
            _find_followers(module, self.unit, False, followers)
        for unit in self.passes.units:
            unit.followers = tuple(followers.get(unit, ()))
            for follower in unit.followers:
                follower.host = unit

    def begin(self) -> None:
        """Before a forward that this unit begins: from the first one on no unit is added. Checks tied parameters.

        Raises RuntimeError if a module uses a parameter of a unit that is not around it, or not in this forward.
        """
        if not self._checked:
            self._find_ties()
            self._checked = self.passes.frozen = True
        for name, managed, unit in self._outside:
            if managed.registered() is not managed.unsharded:
                raise RuntimeError(
                    f"{self.unit.name}.{name} is tied to modules outside, so that {unit.name} gathers it: call that "
                    "module's forward, or its unshard() first"
                )

    def _find_ties(self) -> None:
        """Find the parameters that several modules use: raise, or report which unit holds them."""
        names: dict[Param, dict[str, None]] = {}
        for name, path, attribute, registered in uses_in(self.unit.modules):
            managed = managed_of(registered)
            if managed is None:
                continue
            owner = owner_of(managed)
            unit, inner = owner.unit, not self.unit.root and owner.passes is self.passes
            apart = set(path).isdisjoint(unit.modules)
            if Place(path[-1], attribute) not in managed.places or (apart and not inner):
                raise RuntimeError(
                    f"{name} is the same parameter as {managed.name} of another fully_shard call ({unit.name}), "
                    "which does not hold it for this module. Tie parameters before fully_shard, remove "
                    "parametrizations before it too, and call it on a module around all that share one, usually the "
                    "model itself, before the first forward"
                )
            if unit.host is None and any(_is_skippable(module) for module in path):
                unit.always_reduced = True
            if apart:
                self._outside.append((name, managed, unit))
            names.setdefault(managed, {})[name] = None
        for managed, same in names.items():
            if len(same) > 1 and self.unit.root:
                unit = owner_of(managed).unit
                others = [param.name for param in managed.group.params if param is not managed]
                with_it = f", with {', '.join(others)}" if others else ""
                _log.info(
                    "%s: one parameter, gathered and reduced by %s%s", " = ".join(same), unit.name, with_it
                )


def _find_followers(
    module: nn.Module, host: Unit, skippable: bool, followers: dict[Unit, list[Unit]]
) -> None:
    """Add the units inside a module that ranks may skip, by the nearest unit around them that no rank skips.

    `host` is that unit for those directly inside; `skippable`: the module is inside a unit that ranks may skip.
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
    member: Member | None = module.__dict__.get(_ATTRIBUTE)
    return member


def _is_skippable(module: nn.Module) -> bool:
    member = member_of(module)
    return member is not None and member.unit.options.skippable


def register(member: Member) -> None:
    """Note a new member on its modules."""
    for module in member.unit.modules:
        module.__dict__[_ATTRIBUTE] = member


def owner_of(managed: Param) -> Member:
    """The unit that has a parameter."""
    member = member_of(managed.group.home)
    assert member is not None
    return member


def _unreduced(sharded: RaggedDTensor) -> str:
    """Why `full_tensor` of a sharded tensor must be told about its gradient: in a forward each rank has its own."""
    model = "" if sharded.device_mesh.size() == 1 else model_in_forward()
    if not model:
        return ""
    managed = managed_of(sharded)
    of = "a sharded tensor" if managed is None else f"{managed.name} of {owner_of(managed).unit.name}"
    return (
        f"full_tensor() or redistribute() of {of} {tuple(sharded.shape)} in a forward of {model}: each rank would "
        "get its own batch's gradient only. Call the module that has the parameter, or its unshard() before, or a "
        "method of it after register_fsdp_forward_method. Or pass the placements of ranks' gradients: "
        "grad_placements=[Partial()] * mesh.ndim sums them, [Replicate()] * mesh.ndim takes them to be equal, as a "
        f"regularizer's are. (If that forward was interrupted, call reset_iter_state() of {model}.)"
    )


RaggedDTensor.refusals.append(_unreduced)


def uses_in(modules: Sequence[nn.Module]) -> list[tuple[str, tuple[nn.Module, ...], str, nn.Parameter]]:
    """Each parameter, once for each path on which it is reached: name, modules on the path, attribute, parameter."""
    uses = []
    ahead: list[tuple[str, tuple[nn.Module, ...]]] = []
    for number, module in enumerate(modules):
        ahead.insert(0, ("" if len(modules) == 1 else f"{number}.", (module,)))
    while ahead:
        prefix, path = ahead.pop()
        for attribute, param in path[-1]._parameters.items():
            if param is not None:
                uses.append((prefix + attribute, path, attribute, param))
        for name, child in reversed(path[-1]._modules.items()):
            if child is not None:
                ahead.append((f"{prefix}{name}.", (*path, child)))
    return uses
