"""`full_params`: whole parameters in the modules for a while, for code that reads or writes them as plain tensors."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from .._params.group import Group
from .._params.unit import Param
from .._plan.param import Place
from .runs import gather, in_order_of_memory, runs_of, tensors_of
from .targets import units_of


@contextmanager
def full_params(module: nn.Module, *, writeback: bool = True) -> Iterator[None]:
    """Inside, the units in a module have whole, plain parameters; values written to them go into the shards.

    For code that works on weights, such as peft's `merge_adapter`, and `merge_and_unload`, whose result trains on if
    `fully_shard` took `model.get_base_model()` and not the model around it. Every rank enters, and must write the same.
    One all-gather a segment of a group, in the dtype that parameters are kept in, after an all-reduce of 64 bytes on
    each axis, which finds a rank without memory for it; leaving communicates nothing. Memory: all parameters of the
    module's units; go unit by unit where that is too much. Parameters are other objects inside, without gradients.

    Args:
        module: with units inside, or one itself; in which no forward or backward is under way.
        writeback: copy written values into the shards, unless an exception is raised. False: for reading.

    Raises:
        RuntimeError: parameters are offloaded, or in another `full_params`.
        NotImplementedError, ValueError: a parameter that another parallelism has cut, a tensor subclass, or on meta;
            or, leaving, one that has another shape, or different values in modules that share it, or that was
            registered under another name or removed inside, where no unit would train it; by name.
    """
    units = units_of(module)
    for unit in units:
        unit.check_open()
        for param in unit.params:
            name = f"full_params: {param.name} of {unit.name}"
            reason = param.group.refused_whole if param.other is None else "cut by another parallelism"
            if reason:
                raise NotImplementedError(f"{name} is {reason}; use its full_tensor()")
            if param.sharded.is_meta:
                raise ValueError(f"{name} is on the meta device")
    for unit in units:
        unit.adopt()
    groups = [group for unit in units for group in unit.groups]
    with torch.no_grad():
        whole = [pair for group in groups for pair in _gathered(group)]
    for unit in units:
        unit.closed = "are whole inside of full_params; leave it before they are used"
    known, puts = _places(module), []
    for param, full in whole:
        put = nn.Parameter(full, requires_grad=False)
        puts.append(put)
        for slots, attribute in param.slots:
            slots[attribute] = put
    try:
        yield
        _refuse_added(module, known, puts)
        if writeback:
            with torch.no_grad():
                written = [(param, _written(param)) for param, _ in whole]
                for param, value in written:
                    param.group.write_back(param, param.group.plan.geometry.cut(param.key, value))
    finally:
        for unit in units:
            unit.closed = ""
        for param, _ in whole:
            for slots, attribute in param.slots:
                slots[attribute] = param.sharded


def _places(module: nn.Module) -> dict[Place, str]:
    """The places in a module where parameters are registered, with their names."""
    return {
        Place(inner, attribute): f"{prefix}.{attribute}" if prefix else attribute
        for prefix, inner in module.named_modules()
        for attribute, param in inner._parameters.items()
        if param is not None
    }


def _refuse_added(module: nn.Module, known: dict[Place, str], puts: list[nn.Parameter]) -> None:
    """Raise ValueError for a whole parameter in a new place, and for weights that took the place of a removed one."""
    units, now = {id(put) for put in puts}, _places(module)
    gone = {place.module: name for place, name in known.items() if place not in now}
    for inner, name in gone.items():
        if isinstance(inner, ParametrizationList):  # the weight that was computed of it may be a buffer now
            raise ValueError(
                f"full_params: {name} was removed inside, and the weight that was computed of it is in no unit, where "
                "it would not be trained. Call remove_parametrizations before fully_shard"
            )
    for place, name in now.items():
        param = place.module._parameters[place.attribute]
        if place in known or param is None:
            continue
        if id(param) in units or (param.requires_grad and place.module in gone):
            raise ValueError(
                f"full_params: {name} was registered inside, where no unit gathers it or reduces its gradient. Call "
                "remove_parametrizations or remove_weight_norm before fully_shard"
            )


def _gathered(group: Group) -> Iterator[tuple[Param, torch.Tensor]]:
    if not group.holds_values:
        for param in group.params:
            sharded: Any = param.sharded
            yield param, sharded.full_tensor()
        return
    for run in runs_of(((param, param.sharded.dtype) for param in in_order_of_memory(group)), sys.maxsize):
        full = gather(run, None)
        assert full is not None
        yield from zip(run.members, tensors_of(run, full), strict=True)


def _written(param: Param) -> torch.Tensor:
    values: dict[int, torch.Tensor] = {}
    for slots, attribute in param.slots:
        value = slots.get(attribute)
        if value is None or tuple(value.shape) != param.shape:
            raise ValueError(
                f"full_params: {param.name} is {None if value is None else tuple(value.shape)} now; expected a tensor "
                f"of shape {param.shape}"
            )
        values[id(value)] = value.detach()
    first, *others = values.values()
    if not all(torch.allclose(first, other.to(first), rtol=0, atol=0, equal_nan=True) for other in others):
        raise ValueError(
            f"full_params: {param.name} is one parameter in {len(param.slots)} modules, and was given different values "
            "for them"
        )
    return first
