"""State dicts show and take sharded parameters.

Saving: sharded parameters are put back first, so entries are `RaggedDTensor`s that alias them. Loading takes
entries laid out alike (copied), on any other ragged layout or FSDP2's `Shard(0)` (redistributed), and full plain
tensors (cut), with and without `assign=True`.
"""

from typing import Any

import torch
from torch import nn

from ._unit import Param, Unit


def attach(unit: Unit) -> None:
    """Hook a unit into saving and loading of each module that holds one of its parameters."""
    modules = dict.fromkeys(unit.modules)
    for group in unit.groups:
        for param in group.params:
            for place in param.places:
                modules[place.module] = None
    save, load = _before_save(unit), _before_load(unit)
    for module in modules:
        module.register_state_dict_pre_hook(save)
        module.register_load_state_dict_pre_hook(load)


def _before_save(unit: Unit) -> Any:
    def hook(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        unit.reshard()

    return hook


def _before_load(unit: Unit) -> Any:
    def hook(
        module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
    ) -> None:
        unit.reshard()
        assign = local_metadata.get("assign_to_params_buffers", False)
        for param, attribute in _held_by(unit, module):
            value = state_dict.get(prefix + attribute)
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(param.sharded.shape):
                continue  # load_state_dict reports it with its own words
            if value.is_meta or (param.sharded.is_meta and not assign):
                continue
            loaded: torch.Tensor = param.group.as_sharded(param, value)
            if assign and isinstance(value, nn.Parameter):
                loaded = value if loaded is value else nn.Parameter(loaded, value.requires_grad)
            state_dict[prefix + attribute] = loaded

    return hook


def _held_by(unit: Unit, module: nn.Module) -> list[tuple[Param, str]]:
    return [
        (param, place.attribute) for param in unit.params for place in param.places if place.module is module
    ]
