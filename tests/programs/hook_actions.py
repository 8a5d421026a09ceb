"""Actions: hooks that change values, and optimizers that step within a backward."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .layers import InPlace
from .world import World, action, coin, layer


def changed(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A container with each of its tensors changed."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: changed(value, change) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        items = [changed(item, change) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if dataclasses.is_dataclass(tree):
        made = copy.copy(tree)
        for field in dataclasses.fields(tree):
            object.__setattr__(made, field.name, changed(getattr(tree, field.name), change))
        return made
    return tree


def scaled_down(tree: Any) -> Any:
    """Half of each tensor; tokens are turned around."""
    return changed(tree, lambda t: t * 0.5 if t.is_floating_point() else t.flip(-1))


def _in_place(module: nn.Module, args: Any, output: Any) -> None:
    if isinstance(output, torch.Tensor):
        output.mul_(0.5)


def _backward(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Torch takes no gradients where no input has one."""
    return scaled_down(inputs) if any(grad is not None for grad in inputs) else None


# The method that registers it, its options and the hook.
MODULE_HOOKS: dict[str, tuple[str, dict[str, bool], Callable[..., Any]]] = {
    "forward": ("register_forward_hook", {}, lambda module, args, output: scaled_down(output)),
    "forward in place": ("register_forward_hook", {}, _in_place),
    "forward first": ("register_forward_hook", {"prepend": True}, lambda module, args, out: scaled_down(out)),
    "pre": ("register_forward_pre_hook", {}, lambda module, args: scaled_down(args)),
    "pre with kwargs": (
        "register_forward_pre_hook", {"with_kwargs": True},
        lambda module, args, kwargs: (scaled_down(args), scaled_down(kwargs)),
    ),
    "backward": ("register_full_backward_hook", {}, _backward),
    "backward pre": ("register_full_backward_pre_hook", {}, lambda module, grads: scaled_down(grads)),
}  # fmt: skip
PLACES = ("layers", "inside", "model", "embed", "head")


def modules_at(model: Any, place: str) -> list[nn.Module]:
    """Modules that hooks are put on: "layers", the first module without children in each, or one by its name."""
    if place == "inside":
        return [next(m for m in layer.modules() if not [*m.children()]) for layer in model.layers]
    return [*model.layers] if place == "layers" else [model if place == "model" else getattr(model, place)]


def register(module: nn.Module, kind: str) -> list[Any]:
    """Register a hook of `MODULE_HOOKS`; returns its handles, none where torch has no such hook."""
    method, options, hook = MODULE_HOOKS[kind]
    wraps_views = "backward" in kind  # of which torch allows no change in place
    if wraps_views and isinstance(module, InPlace):
        return []
    if kind == "forward in place" and (module._backward_hooks or isinstance(module, nn.RNNBase)):
        return []  # an RNN keeps its output for backward
    return [getattr(module, method)(hook, **options)]


@action(
    weight=3,
    gradients=True,
    draw=lambda rng: (rng.choice(list(MODULE_HOOKS)), rng.choice(PLACES), *layer(rng)),
)
def change_by_hooks(w: World, kind: str, place: str, index: int) -> None:
    """Hooks of a module replace what it gets, what it returns, or gradients."""
    modules = modules_at(w.model, place)
    handles = register(modules[index % len(modules)], kind)
    loss = w.loss()
    w.note("loss", loss)
    loss.backward()
    for handle in handles:
        handle.remove()


@action(gradients=True, draw=lambda rng: (*layer(rng), *coin(rng)))
def tensor_hook(w: World, index: int, keeps: bool) -> None:
    """A hook on a layer's output halves its gradient, which the output keeps or not."""
    w.model.captures = index % len(w.model.layers)
    loss = w.loss()
    found, w.model.captured, w.model.captures = w.model.captured, None, None
    if found.requires_grad:
        found.register_hook(lambda grad: grad * 0.5)
        if keeps:
            found.retain_grad()
    loss.backward()
    if keeps and w.program.recompute != "reentrant":
        w.note("grad", found.grad)


@action(weight=1.2, draw=lambda rng: (rng.choice(("SGD", "AdamW")), *coin(rng), *coin(rng)))
def optimizer_in_backward(w: World, kind: str, later: bool, again: bool = False) -> None:
    """Each parameter is stepped by its own optimizer as soon as its gradient is there, which is then dropped."""
    if w.program.recompute == "reentrant" and (again or "layers.1" in w.program.units[0].modules):
        return  # which adds to gradients in parts: a unit is reduced, and stepped, before it has all of them
    if w.program.precision or w.program.quantized:
        kind = "SGD"  # rounding would turn the sign of small gradients
    w.rest()
    w.clear_gradients()
    trained = {name: param for name, param in w.named() if param.requires_grad}
    make: Any = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}[kind]
    options = {} if kind == "SGD" else {"eps": 1e-3}
    optimizers = {param: make([param], lr=0.01, **options) for param in trained.values()}

    def update(param: nn.Parameter) -> None:
        if param.grad is not None:
            w.round_gradient(param)
            optimizers[param].step()
            param.grad = None

    handles = [param.register_post_accumulate_grad_hook(update) for param in trained.values() if w.units]
    for _ in range(2):
        w.loss(order=[*range(len(w.model.layers)), 0] if again else None).backward()
        w.system.average(w.params)
        for param in trained.values() if not w.units else ():
            update(param)
        if later:
            w.rest()
    for handle in handles:
        handle.remove()
    w.note("with gradients", " ".join(name for name, param in w.params.items() if param.grad is not None))
