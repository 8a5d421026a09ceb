"""A model's tensors by their names in checkpoints: targets of loading, and entries of exports."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from ragged_shard import Box
from ragged_shard.dist import DISTRIBUTED

from .. import _torch_compat as compat
from .._params.empty_buffers import empty_buffers
from .._params.unit import Param, Unit
from .._schedule.model import member_of
from .._torch.tree import local_tensor
from .runs import in_order_of_memory


@dataclass(frozen=True)
class Target:
    """A tensor of a model."""

    name: str  # in the state dict; of a tied tensor the first
    tensor: torch.Tensor  # the parameter or buffer, as it is sharded
    # the parameter in its unit; None for other tensors, and for parameters that are gathered separately
    param: Param | None
    also: tuple[str, ...] = ()  # the other names of a tied tensor

    def values(self, instead: str) -> torch.Tensor:
        """Its values, distributed as it is: its tensor itself, or a copy that is read back from codes.

        Raises NotImplementedError, which names `instead`, for a tensor subclass, whose values this does not reach.
        """
        values = self.tensor if self.param is None else self.param.group.values_of(self.tensor)
        local = local_tensor(values)
        if compat.is_wrapper_subclass(local):
            raise NotImplementedError(f"{self.name} is kept as a {type(local).__name__}; {instead}")
        return values


def targets_of(model: nn.Module) -> list[Target]:
    """Every tensor of a model's state dict, once; raises TypeError for an entry that is not a tensor."""
    entries: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} of the model's state dict is a {type(value).__name__}, not a tensor")
        entries.setdefault(id(value), (value, []))[1].append(name)
    params = [param for unit in units_of(model) for param in unit.params]
    managed = {id(tensor): param for param in params for tensor in (param.registered(), param.sharded)}
    return [
        Target(first, tensor, managed.get(key), tuple(others))
        for key, (tensor, (first, *others)) in entries.items()
    ]


def buffers_without_values(model: nn.Module, loaded: Collection[str]) -> list[str]:
    """Names of buffers on meta, or not written since `to_empty`, that are not among these names of the state dict."""
    will = {plain_name(name) for name in loaded}
    return [name for name in empty_buffers([model]) if plain_name(name) not in will]


def boxes_of(tensor: Any) -> Iterator[tuple[Box, torch.Tensor]]:
    """This rank's boxes of a tensor, each with a view of its memory in the box's shape."""
    if not isinstance(tensor, DISTRIBUTED):
        yield Box((0,) * tensor.dim(), tuple(tensor.shape)), tensor.detach()
        return
    for chunk in tensor.__create_chunk_list__():
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        if box.numel:
            view = tensor.__get_tensor_shard__(MetadataIndex("", chunk.offsets))
            yield box, view.detach().as_subclass(torch.Tensor)


def units_of(model: nn.Module) -> list[Unit]:
    """The units in a model, in the order of its modules."""
    members = filter(None, map(member_of, model.modules()))
    return list(dict.fromkeys(member.unit for member in members))


def device_of(model: nn.Module) -> torch.device:
    """The device that a model's units compute on; torch's default without units."""
    units = units_of(model)
    return units[0].data.device if units else torch.get_default_device()


def adopt_assigned(model: nn.Module) -> None:
    """Adopt parameters that were moved or assigned since the last forward, on every rank; see `Unit.adopt`."""
    for unit in units_of(model):
        if unit.has_moved():
            unit.adopt()


def give_memory(model: nn.Module) -> None:
    """Allocate parameters and persistent buffers that are on the meta device, uninitialised or zeros.

    One 64-byte all-reduce per mesh axis and parameter group that was on meta checks that all ranks planned the same
    layout. The first error, such as of an allocation, is raised after them: the caller raises it on all ranks.
    """
    units, problem = units_of(model), None
    for unit in units:
        try:
            unit.materialize()
        except Exception as error:
            problem = problem or error
    if problem is not None:
        raise problem
    managed, device = {id(param.sharded) for unit in units for param in unit.params}, device_of(model)
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        slots: Any
        for slots in (module._parameters, module._buffers):
            for name, old in slots.items():
                keeps = old is None or not old.is_meta or id(old) in managed
                if keeps or name in module._non_persistent_buffers_set:
                    continue
                if id(old) not in made:
                    new = torch.empty_like(old, device=device).detach()
                    is_param = isinstance(old, nn.Parameter)
                    made[id(old)] = nn.Parameter(new, old.requires_grad) if is_param else new
                slots[name] = made[id(old)]


def plain_name(name: str) -> str:
    """A name without parts of torch's activation checkpointing, which state dicts leave out, and of torch.compile."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def entries_of_model(model: nn.Module, *, buffers: bool) -> list[Target]:
    """Parameters unit by unit in the order of memory, then all others; each once. Reshards gathered parameters.

    Names are as in `plain_name`. Parameters that were moved or assigned are adopted; every rank calls it. Raises
    ValueError, by name, for one on the meta device.

    Args:
        buffers: persistent buffers too.
    """
    adopt_assigned(model)
    by_param: dict[Param, Target] = {}
    others: list[Target] = []
    for target in targets_of(model):
        if target.tensor.is_meta:
            raise ValueError(f"{target.name} is on the meta device and has no values; load them first")
        name, param, value = plain_name(target.name), target.param, target.tensor.detach()
        if param is not None and param.group.holds_values:
            by_param[param] = Target(name, param.sharded.detach(), param)
        elif buffers or param is not None or isinstance(target.tensor, nn.Parameter):
            others.append(Target(name, value if param is None else param.plain(value), None))
    groups = [group for unit in units_of(model) for group in unit.groups if group.holds_values]
    in_order = [param for group in groups for param in in_order_of_memory(group)]
    return [*(by_param[param] for param in in_order if param in by_param), *others]
