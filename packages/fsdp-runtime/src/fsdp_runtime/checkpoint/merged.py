"""`merged_params`: a model with peft's LoRA, exported as if the adapters were merged into its weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ragged_shard.dist import DISTRIBUTED

from .targets import Target, entries_of_model, plain_name

Slots = dict[str, Any]  # parameters of a module, by attribute
PARTS = 16  # of a linear layer's weight, each with its update and that before it is scaled
_INSTEAD = "use full_params(model) and peft's merge_adapter()"


def merged_params(model: nn.Module) -> "Merged":
    """The model for `iter_full_params`, `save_safetensors` and `weight_source`, with its LoRA in its weights.

    `save_safetensors(merged_params(model), "out")` exports the base model: its names, no adapters, and each adapted
    weight as peft's `merge` makes it of whole tensors, in the dtype that it is kept in, before it is cast. Nothing in
    the model changes. The factors of each adapted weight are sent to every rank too. Linear layers are merged some rows
    at a time, which takes an eighth of the weight; others take two more weights.

    Args:
        model: a `peft.PeftModel`, or one with LoRA layers inside, sharded or not. Adapters count that are active now
            and not merged, and modules of `modules_to_save`.

    Raises:
        NotImplementedError: adapters of another kind than LoRA on linear layers, convolutions, embeddings and single
            parameters; by name.
        ImportError: peft is not installed.
    """
    return Merged(model)


@dataclass(frozen=True)
class Adapter:
    """One LoRA layer, and the weight that it adapts."""

    layer: Any  # peft's
    places: list[tuple[Slots, str]]  # where the weight is, and the factors that are merged into it
    # of a linear layer, which factors have the rows of the weight; others are merged as a whole
    by_rows: list[bool] | None

    def check(self) -> None:
        """Merge on meta: what peft refuses to merge, it refuses here, on every rank and before anything is sent."""
        kept = [slots[attribute] for slots, attribute in self.places]
        weight, *factors = (torch.empty(each.shape, dtype=each.dtype, device="meta") for each in kept)
        self.merge(weight, factors)

    def whole_factors(self) -> list[torch.Tensor]:
        """The factors as whole tensors, on every rank; communicates."""
        sharded = [slots[attribute].detach() for slots, attribute in self.places[1:]]
        return [each.full_tensor() if isinstance(each, DISTRIBUTED) else each for each in sharded]

    def merge(self, weight: torch.Tensor, factors: list[torch.Tensor]) -> torch.Tensor:
        """The merged weight, in the memory of this one or in new memory."""
        if self.by_rows is None:
            return self._merge(weight, factors)
        for first in range(0, len(weight), step := -(-len(weight) // PARTS)):
            rows = slice(first, first + step)
            some = [each[rows] if cut else each for each, cut in zip(factors, self.by_rows, strict=True)]
            weight[rows].copy_(self._merge(weight[rows], some))
        return weight

    def _merge(self, weight: torch.Tensor, factors: list[torch.Tensor]) -> torch.Tensor:
        layer, (slots, attribute) = self.layer, self.places[0]
        merged, caches = list(layer.merged_adapters), dict(layer._caches)
        try:
            with _replaced(self.places, [weight, *(factor.to(weight.device) for factor in factors)]):
                layer.merge()
                result: torch.Tensor = slots[attribute].detach()
        finally:
            layer.merged_adapters[:] = merged
            layer._caches.clear()
            layer._caches.update(caches)
        return result


@contextmanager
def _replaced(places: list[tuple[Slots, str]], values: list[torch.Tensor]) -> Iterator[None]:
    before = [slots[attribute] for slots, attribute in places]
    try:
        for (slots, attribute), value in zip(places, values, strict=True):
            slots[attribute] = nn.Parameter(value, requires_grad=False)
        yield
    finally:
        for (slots, attribute), value in zip(places, before, strict=True):
            slots[attribute] = value


class Merged:
    """A model whose exports have its adapters merged, for `merged_params`."""

    def __init__(self, model: nn.Module) -> None:
        import peft

        self._peft, self._model = peft, model
        # the model that the names belong to
        self.base: nn.Module = model.get_base_model() if isinstance(model, peft.PeftModel) else model
        # of each adapted weight, by its name in the base; applied in this order
        self.adapters: dict[str, list[Adapter]] = {}
        self._names: dict[str, str] = {}  # in the base, by name in the model
        self._by_weight: dict[int, list[Adapter]] = {}  # a tied weight has one list
        self._walk(model, "", "")

    def entries(self, *, buffers: bool) -> list[Target]:
        """Entries of the base, as of `entries_of_model`."""
        entries = entries_of_model(self._model, buffers=buffers)
        return [replace(e, name=self._names[e.name]) for e in entries if e.name in self._names]

    def _walk(self, module: nn.Module, old: str, new: str) -> None:
        """Note the names of tensors in a module; `old` and `new` are its prefixes in the model and in the base."""
        tuners, utils = self._peft.tuners, self._peft.utils
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                self._names[plain_name(old + name)] = plain_name(new + name)
        if isinstance(module, self._peft.PeftModel):
            if not isinstance(module.base_model, tuners.lora.LoraModel):
                self._refuse(module.base_model, old)
            self._walk(module.get_base_model(), f"{old}base_model.model.", new)
        elif isinstance(module, tuners.lora.LoraLayer):
            self._adapt(module, old, new)
            self._walk(module.base_layer, f"{old}base_layer.", new)
        elif isinstance(module, utils.ModulesToSaveWrapper):
            active = [name for name in module.active_adapters if name in module.modules_to_save]
            trained = active and not module.disable_adapters
            chosen = f"modules_to_save.{active[0]}" if trained else "original_module"
            self._walk(module.get_submodule(chosen), f"{old}{chosen}.", new)
        elif isinstance(module, (tuners.tuners_utils.BaseTunerLayer, utils.other.AuxiliaryTrainingWrapper)):
            self._refuse(module, old)
        else:
            for name, child in module.named_children():
                self._walk(child, f"{old}{name}.", f"{new}{name}.")

    def _adapt(self, layer: Any, old: str, new: str) -> None:
        """Note an adapted weight."""
        unmerged = [a for a in layer.active_adapters if a not in layer.merged_adapters]
        active = [] if layer.disable_adapters else unmerged
        factors: list[tuple[Slots, str]] = []
        cut: list[bool] = []
        for kind in layer.adapter_layer_names:
            for adapter in active:
                held = getattr(layer, kind)
                if adapter in held and isinstance(held, nn.ParameterDict):
                    factors.append((held._parameters, adapter))
                elif adapter in held:
                    slots = [module._parameters for module in held[adapter].modules()]
                    factors += [(each, name) for each in slots for name in each if each[name] is not None]
                cut += [kind == "lora_B"] * (len(factors) - len(cut))
        if not factors:
            return
        base, attribute = layer.get_base_layer(), getattr(layer, "parameter_name", "weight")
        if attribute not in base._parameters or any(layer.lora_bias.get(adapter) for adapter in active):
            self._refuse(layer, old)
        linear = type(layer) is self._peft.tuners.lora.Linear
        by_rows = linear and not layer.fan_in_fan_out and not layer.lora_variant
        adapter = Adapter(layer, [(base._parameters, attribute), *factors], cut if by_rows else None)
        try:
            with torch.no_grad():
                adapter.check()
        except Exception as error:
            name = old.rstrip(".")
            raise NotImplementedError(f"merged_params: peft does not merge {name}: {error}") from error
        adapters = self._by_weight.setdefault(id(base._parameters[attribute]), [])
        adapters.append(adapter)
        self.adapters[plain_name(new + attribute)] = adapters

    def _refuse(self, module: nn.Module, prefix: str) -> None:
        raise NotImplementedError(
            f"merged_params: {prefix.rstrip('.') or 'the model'} is a {type(module).__name__} of "
            f"{type(module).__module__}, which it does not merge; {_INSTEAD}"
        )
