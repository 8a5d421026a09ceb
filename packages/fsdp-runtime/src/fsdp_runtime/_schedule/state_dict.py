"""State dicts show and take sharded parameters.

Saving: entries are the sharded parameters, `RaggedDTensor`s that alias their memory, also while modules hold gathered
ones; nothing is resharded. Loading takes entries of the same layout (copied), of any other ragged layout or FSDP2's
`Shard(0)` (redistributed), and full plain tensors (cut), with and without `assign=True`.

A tied parameter has an entry for each of its names. Loading raises where their values differ, one all-gather of small
objects each; torch's checkpoints load them into different memory (`RaggedDTensor.load_into_copy`).

A kind of group may replace a parameter's entry by others, such as `X.codes`, `X.scales` and `X.format` of a parameter
`X` that is kept as codes; the first two alias it too (with `keep_vars=True` the entry is `X`, the parameter). It loads
from these, or from values under `X`, which are quantized.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import ragged_shard
from ragged_shard import RaggedDTensor, RaggedShard

from .._params.unit import Param, Unit

_names: weakref.WeakKeyDictionary[Param, str] = weakref.WeakKeyDictionary()  # the first in a state dict
_loading: weakref.WeakKeyDictionary[Param, object] = (
    weakref.WeakKeyDictionary()
)  # the call that has loaded it


def attach(unit: Unit, modules: Iterable[nn.Module]) -> None:
    """Hook a unit into saving and loading of modules that hold parameters of it."""

    def before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        unit.check_open()
        unit.check_unwritten()

    def after_save(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        for param, attribute in _params_in(unit, module):
            key = prefix + attribute
            value: Any = state_dict.get(key)
            registered = module._parameters.get(attribute)
            if value is None or (registered is not param.sharded and registered is not param.unsharded):
                continue  # assigned by the user: saved as it is
            if not isinstance(value, RaggedDTensor):
                keep_vars = value is param.unsharded
                state_dict[key] = value = param.sharded if keep_vars else param.sharded.detach()
            if value is not param.sharded:
                first = _names.get(param, key)
                if first != key and first in state_dict:
                    value.load_into_copy()
                else:
                    _names[param] = key
                param.group.split_entry(param, state_dict, key)

    def before_load(
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *others: Any,
    ) -> None:
        call = others[-1]  # the list of errors, one for each call of load_state_dict
        unit.check_open()
        unit.reshard()
        assign = local_metadata.get("assign_to_params_buffers", False)
        if not assign and unit.has_moved():
            unit.adopt()  # else values would be compared with those before an assignment
        for param, attribute in _params_in(unit, module):
            param.group.join_entries(param, state_dict, prefix + attribute)
            value = state_dict.get(prefix + attribute)
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(param.sharded.shape):
                continue  # load_state_dict reports it with its own words
            if isinstance(value, RaggedDTensor):
                value = value.loaded
            if value.is_meta or (param.sharded.is_meta and not assign):
                continue
            if type(value) is DTensor and any(isinstance(p, RaggedShard) for p in value.placements):
                # set_model_state_dict made it of rank 0's tensor for a parameter on the meta device.
                value = ragged_shard.redistribute(value, placements=value.placements)
            loaded: torch.Tensor = param.group.as_sharded(param, value)
            if assign and isinstance(value, nn.Parameter):
                loaded = value if loaded is value else nn.Parameter(loaded, value.requires_grad)
            if not assign and _loading.get(param) is call:  # loaded under another name already
                param.group.check_same(param, param.sharded, loaded)
            _loading[param] = call
            state_dict[prefix + attribute] = loaded

    for each in modules:
        each.register_state_dict_pre_hook(before_save)
        each.register_state_dict_post_hook(after_save)
        each.register_load_state_dict_pre_hook(before_load)


def _params_in(unit: Unit, module: nn.Module) -> list[tuple[Param, str]]:
    return [
        (param, place.attribute) for param in unit.params for place in param.places if place.module is module
    ]
