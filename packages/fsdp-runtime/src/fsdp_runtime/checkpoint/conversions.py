"""Names and forms that tensors of a transformers model have in files, where they differ from the model's.

transformers 5 keeps the rules with each type of model; `from_pretrained` and `save_pretrained` follow them, and so do
`load_safetensors` and `save_safetensors`. Other models, and transformers before 5, have none.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from .rules import Equation, Shapes


def equations_of(model: nn.Module, shapes: Shapes, files: Iterable[str]) -> dict[str, Equation]:
    """The model's rules for tensors of files, by its names; raises ValueError for one that reading cannot follow."""
    known = _transformers_of(model)
    if known is None:
        return {}
    loading, mapping, twin = known
    transforms = mapping.get_model_conversion_mapping(twin) or ()
    renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    equations: dict[str, Equation] = {}
    converted: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for file in sorted(files, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(file, renamings, converters)
        if pattern is not None:
            _, sources = converted.setdefault(name, (by_pattern[pattern], {}))
            sources.setdefault(pattern, []).append(file)
        elif name in shapes and name != file:
            equations[name] = Equation((name,), ((file,),))
    for name, (converter, sources) in converted.items():
        lists = [sources[pattern] for pattern in converter.source_patterns if pattern in sources]
        equation = _equation(name, converter, lists, loading)
        equations.update(dict.fromkeys(equation.models, equation))
    return equations


def _equation(name: str, converter: Any, lists: list[list[str]], loading: Any) -> Equation:
    """The equation of a converter; `lists` are names in the file, one list for each of its patterns."""
    merge, concatenate, chunk = loading.MergeModulelist, loading.Concatenate, loading.Chunk
    stack = len({len(files) for files in lists}) == 1
    match converter.operations:
        case [merge(dim=0)] if stack and len(lists) == 1:
            return Equation((name,), tuple((file,) for file in lists[0]), stacked=True)
        case [merge(dim=0), concatenate(dim=dim)] if stack and dim > 0:
            return Equation((name,), tuple(zip(*lists, strict=True)), stacked=True, dim=dim - 1)
        case [concatenate(dim=dim)]:
            return Equation((name,), (tuple(file for files in lists for file in files),), dim=dim)
        case [chunk(dim=dim, num_shards_attribute=None)] if len(lists) == len(lists[0]) == 1:
            first, *others = converter.target_patterns
            if name.count(first) == 1:
                models = (name, *(name.replace(first, other) for other in others))
                return Equation(models, (tuple(lists[0]),), dim=dim)
    operations = [type(operation).__name__ for operation in converter.operations]
    raise ValueError(
        f"{name} is made of {[file for files in lists for file in files][:4]} by {operations} of transformers, which "
        "load_safetensors does not follow; use from_pretrained on rank 0, then set_full_state_dict(rank0_only=True)"
    )


class FileGroups:
    """Tensors of a model that come one by one, in the form of files: transformers models as `save_pretrained` does.

    Tensors that are converted together are a group, which is complete once all have come; others are groups of one.

    Args:
        tensors: on meta, in the order in which they will come.

    Attributes:
        made: tensors of each group in the form of files, on meta, by name; in the order in which groups are complete.
    """

    def __init__(self, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        self._in_files: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = dict
        groups: dict[str | tuple[str], list[str]] = {name: [name] for name in tensors}
        known = _transformers_of(model)
        if known is not None:
            loading, mapping, twin = known
            transforms = getattr(model, "_weight_conversions", None) or [
                transform
                for transform in mapping.get_model_conversion_mapping(twin, add_legacy=False)
                if not isinstance(transform, loading.PrefixChange)
            ]
            twin._weight_conversions = transforms
            self._in_files = partial(loading.revert_weight_conversion, twin)
            reverse = [transform.reverse_transform() for transform in reversed(transforms)]
            converters = [each for each in reverse if isinstance(each, loading.WeightConverter)]
            for name in tensors if converters else ():
                made, pattern = loading.apply_converters(name, converters)
                if pattern is not None:
                    groups.setdefault((made,), []).append(groups.pop(name)[0])
        place = {name: number for number, name in enumerate(tensors)}
        in_order = sorted(groups.values(), key=lambda group: place[group[-1]])
        self.made = [self._in_files({name: tensors[name] for name in group}) for group in in_order]
        self._group_of = {name: group for group in in_order for name in group}

    def in_file_form(
        self, tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors in the form of files, each group when its last one has come; others wait on `device`."""
        waiting: dict[str, dict[str, torch.Tensor]] = {}  # by the last name of their group
        for name, full in tensors:
            group = self._group_of[name]
            members = waiting.setdefault(group[-1], {})
            members[name] = full if len(group) == 1 else full.to(device or full.device, copy=True)
            complete = len(members) == len(group)
            del full, members  # before the next is gathered
            if complete:
                yield from self._in_files(waiting.pop(group[-1])).items()


def _transformers_of(model: nn.Module) -> tuple[Any, Any, Any] | None:
    """transformers' `core_model_loading` and `conversion_mapping`, and a model of its own class to ask them about.

    None for models of other libraries, and before transformers 5. A sharded model is made again, on meta.
    """
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if kind is None or not isinstance(model, kind):
        return None
    try:
        from transformers import conversion_mapping, core_model_loading
    except ImportError:  # before 5
        return None
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return core_model_loading, conversion_mapping, copy.copy(model)
    original: Any = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return core_model_loading, conversion_mapping, original(copy.deepcopy(model.config))
