"""What a model holds, by its names in checkpoints, and how each is gathered: with its group, or by itself."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from .._params.group import Group
from .._params.unit import Param
from .targets import targets_of, units_of

# What wrappers put into names: torch's activation checkpointing, which state dicts leave out, and torch.compile.
CHECKPOINTED = "_checkpoint_wrapped_module."
_WRAPPERS = (CHECKPOINTED, "_orig_mod.")


@dataclass(frozen=True)
class Entry:
    """One tensor of a model.

    Attributes:
        name: in its state dict, without those of wrappers; of a tied tensor the first.
        tensor: the sharded parameter, or a buffer.
        param: the parameter in its group; None if it is gathered separately.
        separate: the group of a parameter that is gathered separately; None for tensors that no unit has.
    """

    name: str
    tensor: torch.Tensor
    param: Param | None
    separate: Group | None = None

    @property
    def group(self) -> Group:
        """Of a parameter that is gathered with its group."""
        assert self.param is not None
        return self.param.group

    @property
    def segment(self) -> int:
        """The segment of the group's layout that it is in."""
        assert self.param is not None
        return self.group.plan.geometry.slices[self.param.name].segment

    @property
    def offset(self) -> int:
        """Where it begins in the gathered segment."""
        assert self.param is not None
        return self.group.plan.geometry.slices[self.param.name].offset


def entries_of_model(model: nn.Module, *, buffers: bool) -> list[Entry]:
    """Parameters unit by unit as they lie in memory, then all others; each once. Reshards what is gathered.

    Args:
        buffers: persistent buffers too.

    Raises:
        ValueError: a parameter on the meta device, by name.
    """
    names: dict[int, str] = {}
    others: list[Entry] = []
    for target in targets_of(model):  # reshards, so that the modules hold the sharded parameters
        if target.tensor.is_meta:
            raise ValueError(f"{target.name} is on the meta device and has no values; load them first")
        name = target.name
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        names[id(target.tensor)] = name
        param = target.param
        if param is not None and param.group.holds_values:
            continue
        if buffers or param is not None or isinstance(target.tensor, nn.Parameter):
            group = None if param is None else param.group
            others.append(Entry(name, target.tensor.detach(), None, group))
    return [*_by_group(model, names), *others]


def _by_group(model: nn.Module, names: dict[int, str]) -> Iterator[Entry]:
    for unit in units_of(model):
        for group in unit.groups:
            if not group.holds_values:
                continue
            found = [
                Entry(names[id(param.sharded)], param.sharded.detach(), param)
                for param in group.params
                if id(param.sharded) in names
            ]
            yield from sorted(found, key=lambda entry: (entry.segment, entry.offset))
