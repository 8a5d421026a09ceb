"""Hooks of modules that change what a module gets, what it returns, or gradients."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


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


def register(module: nn.Module, kind: str, program: Any) -> list[Any]:
    """Register a hook of `MODULE_HOOKS`; returns its handles, none where torch does not allow the hook."""
    method, options, hook = MODULE_HOOKS[kind]
    other = program.module_hooks.partition(":")[0]
    # Full backward hooks wrap tensors as views that must not change in place.
    if "backward" in kind and ("in place" in program.layers or other == "forward in place"):
        return []
    if kind == "forward in place" and ("backward" in other or isinstance(module, nn.RNNBase)):
        return []  # an RNN keeps its output for backward
    return [getattr(module, method)(hook, **options)]
