"""Optimizers that update a unit's parameters inside backward, as soon as its gradients are reduced, and free these.

backward of   block 3 | block 2 | block 1 | ...
reduces                 block 3 | block 2 | ...
updates                           block 3 | block 2 ...    so at most two units' gradients are alive
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from .._schedule.model import member_of

NamedParams = list[tuple[str, nn.Parameter]]
Make = Callable[[NamedParams], torch.optim.Optimizer]

_updated = WeakTensorKeyDictionary()


def updated_in_backward(params: Iterable[torch.Tensor]) -> bool:
    """Whether an optimizer updates one of these parameters inside backward."""
    return bool(_updated) and any(param in _updated for param in params)


def optimizer_in_backward(model: nn.Module, make: Make) -> list[torch.optim.Optimizer]:
    """Update each unit's parameters inside backward, as soon as their gradients are reduced, and free the gradients.

        optimizers = optimizer_in_backward(model, lambda params: torch.optim.AdamW(params, lr=1e-3))
        loss.backward()        # updates the parameters of units
        step_rest(optimizers)  # updates the others

    Of reduced gradients at most two units' are alive at a time instead of all. Updates are those of the same optimizers
    after backward, each for one unit's parameters. Anything that needs all gradients first (a global norm, loss
    scaling) cannot be combined with it: this package's `clip_grad_norm_` raises, and torch's finds no gradients,
    returns 0 and clips nothing. Each backward is a step, unless `set_requires_gradient_sync(False)` or
    `set_is_last_backward(False)` announces more microbatches. Communicates what the optimizers' steps do.

    Args:
        model: sharded with `fully_shard`.
        make: makes an optimizer of one unit's parameters, given with their names in the model. Called for each unit in
            the order of the modules, and last for parameters outside of units, if there are any.

    Returns:
        The optimizers. Make a learning rate scheduler for each; torch's `get_optimizer_state_dict` and
        `set_optimizer_state_dict`, and the functions for full states, take the list.

    Raises:
        ValueError: no unit in the model; parameters that another call has already.
        TypeError: `make` returned something that is not an optimizer.
    """
    units = {member.unit: None for module in model.modules() if (member := member_of(module)) is not None}
    if not units:
        raise ValueError("optimizer_in_backward: no module of the model is sharded; call fully_shard first")
    rest = {id(param): (name, param) for name, param in model.named_parameters()}
    taken = [name for name, param in rest.values() if updated_in_backward([param])]
    if taken:
        raise ValueError(f"optimizer_in_backward: {taken[0]} is updated in backward already; call it once")
    optimizers = []
    for unit in units:
        own = [rest.pop(id(param.sharded)) for param in unit.params if id(param.sharded) in rest]
        if own := [(name, param) for name, param in own if param.requires_grad]:
            optimizers.append(_made(make, own))
            unit.configure(update=partial(_update, optimizers[-1]))
            for _, param in own:
                _updated[param] = True
    if others := [(name, param) for name, param in rest.values() if param.requires_grad]:
        optimizers.append(_made(make, others))
    return optimizers


def step_rest(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Update what backward has not: parameters outside of units, and gradients that you set. Frees these gradients.

    Args:
        optimizers: of `optimizer_in_backward`. Optimizers without a gradient do nothing.
    """
    for optimizer in optimizers:
        _update(optimizer)


def _made(make: Make, params: NamedParams) -> torch.optim.Optimizer:
    optimizer = make(params)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer_in_backward: make returned a {type(optimizer).__name__}; expected an optimizer"
        )
    return optimizer


def _update(optimizer: torch.optim.Optimizer) -> None:
    """Step, if there are gradients, and free them."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(param.grad is not None for param in params):
        optimizer.step()
        for param in params:
            param.grad = None
