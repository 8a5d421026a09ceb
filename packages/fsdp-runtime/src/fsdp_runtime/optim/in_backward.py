"""Updates inside backward: a unit's parameters as soon as its gradients are reduced, which then are freed.

backward of   block 3 | block 2 | block 1 | ...
reduces                 block 3 | block 2 | ...
updates                           block 3 | block 2 ...    so at most two units' gradients are alive
"""

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from .._params.unit import Unit
from .._schedule.model import member_of

NamedParams = list[tuple[str, nn.Parameter]]
Make = Callable[[NamedParams], torch.optim.Optimizer]

_updated = WeakTensorKeyDictionary()


def updated_in_backward(params: Iterable[torch.Tensor]) -> bool:
    """Whether an optimizer updates one of these parameters inside backward."""
    return bool(_updated) and any(param in _updated for param in params)


def optimizer_in_backward(model: nn.Module, make: Make) -> "OptimizerInBackward":
    """Have each unit's parameters updated inside backward, as soon as their gradients are reduced.

    The gradients are freed at once: of those that are reduced, at most two units' are alive at a time instead of all.
    Updates are those of the same optimizers after backward, where each looks at one unit's parameters by itself; what
    needs all gradients first (a global norm, loss scaling) cannot be combined with it: this package's `clip_grad_norm_`
    raises, and torch's finds no gradients, returns 0 and clips nothing. Each backward is a step, unless
    `set_requires_gradient_sync(False)` or `set_is_last_backward(False)` says that more microbatches follow.
    Communicates what the optimizers' steps do.

    Args:
        model: sharded with `fully_shard`.
        make: makes an optimizer of one unit's parameters, given with their names in the model, such as
            ``lambda params: torch.optim.AdamW(params, lr=1e-3)``. Called for each unit in the order of the modules,
            and last for the parameters that no unit has, if there are any: these are updated in `step`.

    Raises:
        ValueError: no unit in the model; parameters that another call has already.
        TypeError: `make` returned something that is not an optimizer.
    """
    units: dict[Unit, None] = {}
    for module in model.modules():
        if (member := member_of(module)) is not None:
            units[member.unit] = None
    if not units:
        raise ValueError("optimizer_in_backward: no module of the model is sharded; call fully_shard first")
    rest = {id(param): (name, param) for name, param in model.named_parameters()}
    taken = [name for name, param in rest.values() if updated_in_backward([param])]
    if taken:
        raise ValueError(f"optimizer_in_backward: {taken[0]} is updated in backward already; call it once")
    optimizers = []
    for unit in units:
        own = [rest.pop(id(p.sharded)) for p in unit.params if id(p.sharded) in rest]
        if own := [(name, param) for name, param in own if param.requires_grad]:
            optimizers.append(_made(make, own))
            unit.configure(update=partial(_update, optimizers[-1]))
            for _, param in own:
                _updated[param] = True
    if others := [(name, param) for name, param in rest.values() if param.requires_grad]:
        optimizers.append(_made(make, others))
    return OptimizerInBackward(optimizers)


def _made(make: Make, params: NamedParams) -> torch.optim.Optimizer:
    found = make(params)
    if not isinstance(found, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer_in_backward: make returned a {type(found).__name__}; expected an optimizer"
        )
    return found


def _update(optimizer: torch.optim.Optimizer) -> None:
    """Step, if there are gradients, and free them."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(param.grad is not None for param in params):
        optimizer.step()
        for param in params:
            param.grad = None


class OptimizerInBackward(torch.optim.Optimizer):
    """What `optimizer_in_backward` returns: stands for all units' optimizers in a training loop.

    Learning rate schedulers, `zero_grad`, state dicts and torch's distributed checkpoints take it. Parameter groups are
    the optimizers' own, one after the other; so are states.

    Attributes:
        optimizers: one for each unit with parameters that are trained, in the order of the modules.
    """

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        super().__init__([{"params": list(group["params"])} for group in groups], {})
        self.param_groups = groups
        self.state = _States(optimizers)  # type: ignore[assignment]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update what backward has not: parameters outside of units, and gradients that were set by hand.

        Returns:
            what the closure returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            _update(optimizer)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused, but for the groups that this was made with."""
        if hasattr(self, "state") and isinstance(self.state, _States):
            raise RuntimeError(
                "optimizer_in_backward: its units are fixed; make a new one of the whole model"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The optimizers' state dicts as one, parameters numbered from the first to the last."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for optimizer in self.optimizers:
            found, first = optimizer.state_dict(), sum(len(group["params"]) for group in groups)
            state |= {first + number: value for number, value in found["state"].items()}
            groups += [{**g, "params": [first + n for n in g["params"]]} for g in found["param_groups"]]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ValueError: another number of groups.
        """
        groups = list(state_dict["param_groups"])
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"optimizer_in_backward: the state dict has {len(groups)} parameter groups, expected "
                f"{len(self.param_groups)}, those of each unit in the order of the modules"
            )
        for optimizer in self.optimizers:
            mine, groups = groups[: len(optimizer.param_groups)], groups[len(optimizer.param_groups) :]
            names = [
                name for group in mine for name in group["params"]
            ]  # numbers, or names from torch's checkpoints
            numbers = {name: number for number, name in enumerate(names)}
            state = {
                numbers[name]: state_dict["state"][name] for name in names if name in state_dict["state"]
            }
            own = [{**group, "params": [numbers[name] for name in group["params"]]} for group in mine]
            optimizer.load_state_dict({"state": state, "param_groups": own})
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]


class _States(MutableMapping[torch.Tensor, Any]):
    """The states of several optimizers, each in its own."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def _of(self, param: torch.Tensor) -> Any:
        for optimizer in self._optimizers:
            if any(param is one for group in optimizer.param_groups for one in group["params"]):
                return optimizer.state
        raise KeyError(param)

    def __getitem__(self, param: torch.Tensor) -> Any:
        return self._of(param)[param]

    def __setitem__(self, param: torch.Tensor, value: Any) -> None:
        self._of(param)[param] = value

    def __delitem__(self, param: torch.Tensor) -> None:
        del self._of(param)[param]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (param for optimizer in self._optimizers for param in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)
