"""Notices what a user edited since the optimizer last looked: parameters of groups, options, states.

Everything that an optimizer derives from `param_groups` and `state` is derived from what was seen here. A look where
nothing changed is a few list comparisons.
"""

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch

from block_optim.core._torch_compat import local_of
from block_optim.core.load import own_values
from block_optim.core.params import Group, Param

State = Mapping[torch.Tensor, dict[str, Any]]


def trains(tensor: torch.Tensor) -> bool:
    """Whether a parameter is to be updated: it requires gradients, or was given one."""
    return tensor.requires_grad or tensor.grad is not None


def by_group(params: Iterable[Param]) -> list[tuple[Group, list[Param]]]:
    """Parameters of one group together."""
    found: dict[int, list[Param]] = defaultdict(list)
    for param in params:
        found[id(param.group)].append(param)
    return [(members[0].group, members) for members in found.values()]


class Seen:
    """What was there at the last look.

    Attributes:
        states: the state of each parameter that has one, as `init_states` made it.
        has_more: there may be others since, which `update` or the user added.
    """

    def __init__(self) -> None:
        self.has_more = False
        self.states: dict[torch.Tensor, dict[str, Any]] = {}
        self._groups: list[Group] = []
        self._options: dict[int, Group] = {}
        self._members: list[Any] = []
        self._frozen: list[torch.Tensor] = []
        self._kept: list[tuple[torch.Tensor, str]] = []
        self._objects: list[torch.Tensor] = []
        self._values: list[Any] | None = None
        self._locals: list[torch.Tensor] = []
        self._addresses: list[int] = []

    def note(self, groups: list[Group], params: Iterable[torch.Tensor]) -> None:
        """Look at everything."""
        self._groups = list(groups)  # held, so that ids stay theirs
        self._options = {id(group): _options(group) for group in groups}
        self._members = _members(groups)
        self._frozen = [t for t in params if t not in self.states]
        tensors = [
            ((t, key), value)
            for t, state in self.states.items()
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        ]
        self._kept, self._objects = [place for place, _ in tensors], [value for _, value in tensors]
        self._values = None
        self._locals = [local_of(value) for _, value in tensors]
        self._addresses = _addresses(self._locals)

    def note_options(self, group: Group) -> None:
        """Look at a group's options."""
        self._options[id(group)] = _options(group)

    def options(self, group: Group) -> Group | None:
        """A group's options at the last look; None for a group that was not there."""
        return self._options.get(id(group))

    def changed(self, group: Group) -> set[str]:
        """The options of a known group that were set, added or removed."""
        before = self._options.get(id(group), {})
        keys = [k for k in group if k != "params" and not (k in before and _same(group[k], before[k]))]
        return {*keys, *(k for k in before if k not in group)}

    def is_current(self, groups: list[Group], state: State) -> bool:
        """Whether groups have the parameters, and these the states, that they had; and none was unfrozen."""
        return (
            _are(_members(groups), self._members)
            and self._has_states(state)
            and _addresses(self._locals) == self._addresses
            and not any(trains(t) for t in self._frozen)
        )

    def _has_states(self, state: State) -> bool:
        # looking a tensor up costs more than walking over all
        values = list(chain.from_iterable([entry.values() for entry in state.values()]))
        if self._values is not None and _are(values, self._values):
            return True
        empty: dict[str, Any] = {}
        if not _are([state.get(t, empty).get(key) for t, key in self._kept], self._objects):
            return False
        self._values = values  # those that were added among them
        self.has_more = True
        return True

    def check_memory(self, params: Mapping[torch.Tensor, Param]) -> None:
        """Raise ValueError where the memory under a state was exchanged."""
        for (tensor, key), local, address in zip(self._kept, self._locals, self._addresses, strict=True):
            if local.data_ptr() != address:
                raise ValueError(
                    f"{params[tensor].name}: state {key!r} lies in other memory than before (its .data was set); "
                    f"assign a tensor, optimizer.state[p][{key!r}] = ..., whose values are then copied"
                )

    def take_states(self, params: Mapping[torch.Tensor, Param], state: dict[Any, Any]) -> list[Param]:
        """Copy values that were assigned into the states' own memory; the parameters whose states were removed.

        Raises:
            ValueError: states that do not fit, or of which a part is missing; nothing was changed.
        """
        cleared = [params[t] for t in self.states if not state.get(t)]
        edited = [(params[t], own, state[t]) for t, own in self.states.items() if state.get(t)]
        sources = [(own, given, own_values(param.name, own, given)) for param, own, given in edited]
        for own, given, values in sources:
            for key, value in values.items():
                if isinstance(own[key], torch.Tensor):
                    if own[key] is not given[key]:
                        local_of(own[key]).copy_(value)
                    given[key] = own[key]
        for param in cleared:
            state[param.tensor] = dict(self.states[param.tensor])
        return cleared


def _options(group: Group) -> Group:
    return {k: list(v) if isinstance(v, list) else v for k, v in group.items() if k != "params"}


def _members(groups: list[Group]) -> list[Any]:
    return [member for group in groups for member in (group, *group["params"])]


def _are(found: list[Any], seen: list[Any]) -> bool:
    """Whether these are the very objects; tensors are not compared."""
    return len(found) == len(seen) and all(map(operator.is_, found, seen))


def _addresses(tensors: list[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and not isinstance(a, torch.Tensor) and bool(a == b))
