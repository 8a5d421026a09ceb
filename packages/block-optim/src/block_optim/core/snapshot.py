"""The state tensors that an optimizer made, as objects and as memory, so that a step sees when either has changed.

same objects, same addresses      nothing to do; a few list comparisons
same objects, other addresses     moved (offloaded, `.data` assigned): what was prepared from addresses is renewed
other objects, or missing ones    assigned or removed by the user: the states of that parameter are made again
"""

import operator
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from block_optim.core._torch_compat import local_of
from block_optim.core.params import Param

States = Mapping[torch.Tensor, Mapping[str, Any]]


class StateSnapshot:
    """The tensors in the states of some parameters, and their addresses."""

    def __init__(self, params: Sequence[Param]) -> None:
        self._places = [
            (param, key, value)
            for param in params
            for key, value in param.states.items()
            if isinstance(value, torch.Tensor)
        ]
        self._known: list[Any] | None = None  # all values at the last look, those of others among them
        self._locals = [local_of(value) for _, _, value in self._places]
        self._addresses = _addresses(self._locals)
        self._layouts = [_layout(local) for local in self._locals]

    def is_current(self, states: States) -> bool:
        """Whether ``states`` has the very objects that it had when `note` was called."""
        # Looking a tensor up costs more than walking over all.
        return self._known is not None and same_objects(_values(states), self._known)

    def note(self, states: States) -> None:
        """Remember all objects for `is_current`."""
        self._known = _values(states)

    def changed(self, states: States) -> set[torch.Tensor]:
        """The parameters of whose state a tensor was removed, or replaced by another object."""
        return {p.tensor for p, key, value in self._places if states.get(p.tensor, {}).get(key) is not value}

    def has_moved(self) -> bool:
        """Whether some tensor is at another address."""
        return _addresses(self._locals) != self._addresses

    def reshaped(self) -> list[tuple[Param, str]]:
        """Parameter and key of each tensor whose memory on this rank has another shape or stride than before."""
        result = zip(self._places, self._locals, self._layouts, strict=True)
        return [(param, key) for (param, key, _), local, layout in result if _layout(local) != layout]


def same_objects(first: list[Any], second: list[Any]) -> bool:
    """Whether two lists have the very same objects; tensors are not compared."""
    return len(first) == len(second) and all(map(operator.is_, first, second))


def _addresses(tensors: list[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


def _values(states: States) -> list[Any]:
    return list(chain.from_iterable([state.values() for state in states.values()]))


def _layout(local: torch.Tensor) -> tuple[Any, ...]:
    return tuple(local.shape), local.stride()
