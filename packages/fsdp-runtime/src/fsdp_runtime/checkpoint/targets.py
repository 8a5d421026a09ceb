"""A model's tensors by their names in checkpoints: targets of loading, and entries of exports.

`Target`   a tensor of the state dict: this rank's boxes of it, and the memory behind them
`Entry`    a tensor to gather, with its group or separately
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from dbuffer import TensorSlice
from ragged_shard import Box
from ragged_shard.dist import DISTRIBUTED

from .. import _torch_compat as compat
from .._params.group import Group
from .._params.unit import Param, Unit
from .._schedule.model import member_of
from .._torch.tree import local_tensor
from .files import whole

# What wrappers put into names: torch's activation checkpointing, which state dicts leave out, and torch.compile.
CHECKPOINTED = "_checkpoint_wrapped_module."
_WRAPPERS = (CHECKPOINTED, "_orig_mod.")


@dataclass(frozen=True)
class Target:
    """A tensor of a model that values are written to.

    Attributes:
        name: in the state dict; of a tied one the first.
        also: its other names.
        tensor: the parameter or buffer, as it is sharded.
        param: the parameter in its unit; None for other tensors.
    """

    name: str
    also: tuple[str, ...]
    tensor: torch.Tensor
    param: Param | None

    @property
    def distributed(self) -> bool:
        """Whether ranks hold boxes of it."""
        return isinstance(self.tensor, DISTRIBUTED)

    def refuse_subclass(self) -> None:
        """Raise NotImplementedError if only a tensor subclass knows how values are kept."""
        local = local_tensor(self.values())
        if compat.is_wrapper_subclass(local):
            raise NotImplementedError(
                f"{self.name} is kept as a {type(local).__name__}, which is not written from files; use "
                "model.load_state_dict(read_safetensors(path))"
            )

    def boxes(self) -> list[Box]:
        """What this rank holds, as boxes of the whole tensor; also while it is on the meta device."""
        tensor: Any = self.tensor
        if not self.distributed:
            return [whole(tuple(tensor.shape))]
        return [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.__create_chunk_list__()]

    def values(self) -> torch.Tensor:
        """A tensor to write into: this one, or memory for its values."""
        tensor = self.tensor.detach()
        return tensor if self.param is None else self.param.group.writable(tensor)

    def keep(self, values: torch.Tensor) -> None:
        """Keep the values that were written into `values()`."""
        if self.param is not None:
            self.param.group.keep(self.tensor.detach(), values)


def views_of(tensor: torch.Tensor, boxes: list[Box]) -> Iterator[tuple[Box, torch.Tensor]]:
    """Each box with the memory behind it, a view of this rank's local tensor in the box's shape."""
    for box in boxes:
        if not box.numel:
            continue
        if not isinstance(tensor, DISTRIBUTED):
            yield box, tensor
            continue
        shard: Any = tensor
        view = shard.__get_tensor_shard__(MetadataIndex("", torch.Size(box.offsets)))
        yield box, view.detach().as_subclass(torch.Tensor)


def targets_of(model: nn.Module) -> list[Target]:
    """Every tensor of a model's state dict, once.

    Raises:
        TypeError: an entry that is not a tensor.
    """
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} of the model's state dict is a {type(value).__name__}, not a tensor")
        tensors[id(value)] = value
        names.setdefault(id(value), []).append(name)
    params = [param for unit in units_of(model) for param in unit.params]
    managed = {id(tensor): param for param in params for tensor in (param.registered(), param.sharded)}
    return [
        Target(first, tuple(others), tensors[key], managed.get(key))
        for key, (first, *others) in names.items()
    ]


def units_of(model: nn.Module) -> list[Unit]:
    """The units in a model, in the order of its modules."""
    units: dict[Unit, None] = {}
    for module in model.modules():
        member = member_of(module)
        if member is not None:
            units[member.unit] = None
    return list(units)


def adopt_assigned(model: nn.Module) -> None:
    """Adopt parameters that were moved or assigned since the last forward, on every rank; see `Unit.adopt`."""
    for unit in units_of(model):
        if unit.has_moved():
            unit.adopt()


def give_memory(model: nn.Module) -> None:
    """Give parameters and persistent buffers on the meta device memory, uninitialised or zeros; communicates.

    One 64-byte all-reduce per mesh axis and parameter group that was on meta, which checks that all ranks planned the
    same layout.
    """
    units = units_of(model)
    for unit in units:
        unit.materialize()
    managed = {id(param.sharded) for unit in units for param in unit.params}
    device = units[0].data.device if units else torch.get_default_device()
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param.is_meta and id(param) not in managed:
                if id(param) not in made:
                    empty = torch.empty_like(param, device=device)
                    made[id(param)] = nn.Parameter(empty.detach(), param.requires_grad)
                module._parameters[name] = made[id(param)]  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and name not in module._non_persistent_buffers_set:
                if id(buffer) not in made:
                    made[id(buffer)] = torch.empty_like(buffer, device=device)
                module._buffers[name] = made[id(buffer)]


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
        """Group of a parameter that is gathered with its group."""
        assert self.param is not None
        return self.param.group

    @property
    def place(self) -> TensorSlice:
        """Position in the group's memory of a parameter that is gathered with its group."""
        assert self.param is not None
        return self.param.group.plan.geometry.slices[self.param.name]


def entries_of_model(model: nn.Module, *, buffers: bool) -> list[Entry]:
    """Parameters unit by unit as they lie in memory, then all others; each once. Reshards what is gathered.

    Parameters that were moved or assigned since the last forward are adopted; every rank calls it.

    Args:
        buffers: persistent buffers too.

    Raises:
        ValueError: a parameter on the meta device, by name.
    """
    adopt_assigned(model)
    names: dict[int, str] = {}
    others: list[Entry] = []
    for target in targets_of(model):
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
            value, group = target.tensor.detach(), None
            if param is not None:
                value, group = param.plain(value), param.group
            others.append(Entry(name, value, None, group))
    return [*_by_group(model, names), *others]


def _by_group(model: nn.Module, names: dict[int, str]) -> Iterator[Entry]:
    for unit in units_of(model):
        for group in unit.groups:
            if not group.holds_values:
                continue
            entries = [
                Entry(names[id(param.sharded)], param.sharded.detach(), param)
                for param in group.params
                if id(param.sharded) in names
            ]
            yield from sorted(entries, key=lambda entry: (entry.place.segment, entry.place.offset))
