"""Actions: layers leave, come and move after the model was sharded; a second sharded model."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from .layers import LAYERS
from .models import loss_of
from .world import World, action, coin, layer

KINDS = ("linear", "split", "stacked", "partly frozen", "experts")


def moved(path: str, places: dict[int, int]) -> str | None:
    """A path, or a name's beginning, after layers have moved; None: its layer is gone."""
    if not path.startswith("layers."):
        return path
    number, dot, rest = path.removeprefix("layers.").partition(".")
    return f"layers.{places[int(number)]}{dot}{rest}" if int(number) in places else None


def relaid(program: Any, places: dict[int, int], layers: tuple[str, ...]) -> Any:
    """A program of these layers, whose units and ignored parameters follow the layers that stay."""
    units = []
    for unit in program.units:
        modules = tuple(path for path in (moved(one, places) for one in unit.modules) if path is not None)
        if modules:
            units.append(dataclasses.replace(unit, modules=modules))
    ignored = (moved(part, places) for part in program.ignored)
    return dataclasses.replace(
        program, layers=layers, units=tuple(units), ignored=tuple(part for part in ignored if part)
    )


def change(
    w: World, edit: Callable[[Any], None], order: list[int], new: str = "", unit: bool = False
) -> None:
    """Change the list of layers, and make the optimizer anew.

    Args:
        edit: changes `model.layers`.
        order: old numbers of the layers that are there now; -1: the new one.
        new: the kind of the new layer.
        unit: wrap the new layer; else its parameters stay plain, and their gradients are the user's to average.
    """
    edit(w.model)
    program = w.program
    layers = tuple(new if old < 0 else program.layers[old] for old in order)
    program = relaid(program, {old: place for place, old in enumerate(order) if old >= 0}, layers)
    like = (*program.units, *w.program.units)
    if new and unit and like:
        blocks = "adamw8bit" if program.optimizer == "adamw8bit" else ""
        made = dataclasses.replace(like[0], modules=(f"layers.{order.index(-1)}",), blocks=blocks)
        made = dataclasses.replace(made, skippable=False)
        if w.units:
            w.system.shard(w.model, program, made)
        program = dataclasses.replace(program, units=(made, *program.units))
    elif new:
        ignored = (*program.ignored, f"layers.{order.index(-1)}.")
        program = dataclasses.replace(program, ignored=ignored)
    w.program = program
    w.units = [w.model.get_submodule(one.modules[-1]) for one in program.units] if w.units else []
    w.params = dict(w.model.named_parameters())
    w.optimizer = w.make_optimizer(w.named())


def ready(w: World) -> bool:
    """Let units rest and drop gradients; False: a unit that is a list would wait for the layer that is gone."""
    w.rest()
    w.clear_gradients()
    return all(len(unit.modules) == 1 or "head" in unit.modules for unit in w.program.units)


def made(w: World, kind: str) -> nn.Module:
    """A new layer, the same on all ranks."""
    torch.manual_seed(w.program.seed + w.batches)
    return LAYERS[kind](w.program.width)


@action(weight=0.5, draw=layer)
def remove_layer(w: World, index: int) -> None:
    count = len(w.model.layers)
    if not ready(w) or count == 1:
        return

    def edit(model: Any) -> None:
        del model.layers[index % count]

    change(w, edit, [old for old in range(count) if old != index % count])


@action(weight=0.5, draw=layer)
def reorder_layers(w: World, first: int) -> None:
    count = len(w.model.layers)
    if not ready(w):
        return
    order = [(first + place) % count for place in range(count)][::-1]

    def edit(model: Any) -> None:
        model.layers = nn.ModuleList(model.layers[old] for old in order)

    change(w, edit, order)


@action(weight=0.8, draw=lambda rng: (*layer(rng), *coin(rng), rng.choice(KINDS)))
def replace_layer(w: World, index: int, unit: bool, kind: str) -> None:
    """A new layer in the place of one, wrapped or plain; a policy of the model says nothing of plain ones."""
    count = len(w.model.layers)
    if not ready(w) or w.program.quantized or (w.program.precision and not unit):
        return

    def edit(model: Any) -> None:
        model.layers[index % count] = made(w, kind)

    change(w, edit, [-1 if old == index % count else old for old in range(count)], kind, unit)


@action(weight=0.8, draw=lambda rng: (*layer(rng), *coin(rng), rng.choice(KINDS)))
def add_layer(w: World, index: int, unit: bool, kind: str) -> None:
    count = len(w.model.layers)
    if not ready(w) or w.program.quantized or (w.program.precision and not unit):
        return
    place = index % (count + 1)

    def edit(model: Any) -> None:
        model.layers.insert(place, made(w, kind))

    change(w, edit, [*range(place), -1, *range(place, count)], kind, unit)


@action(weight=0.5, gradients=True, draw=lambda rng: (*coin(rng), *coin(rng)))
def second_model(w: World, freezes: bool, together: bool) -> None:
    """Another sharded model, a teacher or a student, in the same graph; its gradients, then one step of it."""
    if "subclass" in w.program.layers or w.program.quantized or w.program.optimizer == "adamw8bit":
        return
    unit = dataclasses.replace(w.program.units[0], modules=("layers.0",), blocks="", skippable=False)
    program = dataclasses.replace(
        w.program, layers=("linear",), ends="", units=(unit, dataclasses.replace(unit, modules=("",)))
    )
    other = w.of(program)
    other.model.requires_grad_(not freezes)
    tokens, targets, chosen = w.batch()
    logits, more = w.model(tokens, chosen), other.model(tokens, chosen)
    losses = [loss_of(logits, targets), mse_loss(logits, more)]
    if together or freezes:
        sum(losses[1:], losses[0]).backward()
    else:
        losses[1].backward(retain_graph=True)
        (losses[0] + loss_of(more, targets)).backward()
    other.rest()
    other.system.average(other.params)
    w.note_all("second", {name: param.grad for name, param in other.params.items()})


MIXES: dict[str, Callable[[list[torch.Tensor], list[torch.Tensor]], Any]] = {
    "lerp_": lambda own, other: [a.lerp_(b, 0.25) for a, b in zip(own, other, strict=True)],
    "foreach": lambda own, other: torch._foreach_lerp_(own, other, 0.25),
    "copy_": lambda own, other: [a.copy_(b) for a, b in zip(own, other, strict=True)],
    "add": lambda own, other: [a.copy_(a + b) for a, b in zip(own, other, strict=True)],
}


@action(weight=0.5, draw=lambda rng: (rng.choice(list(MIXES)),))
def mix_models(w: World, how: str) -> None:
    """Weights of a model that is sharded in one unit go into this one's."""
    if w.program.mesh in ("tp", "ep") or "subclass" in w.program.layers or w.program.quantized:
        return
    whole = dataclasses.replace(w.program.units[-1], modules=("",), skippable=False)
    other = w.of(dataclasses.replace(w.program, units=(whole,)))
    w.rest()
    both = [(p, other.params[n]) for n, p in w.named() if n in other.params and p.is_floating_point()]
    both = [(own, more) for own, more in both if own.shape == more.shape and own.numel()]
    with torch.no_grad():
        MIXES[how]([own for own, _ in both], [more for _, more in both])
