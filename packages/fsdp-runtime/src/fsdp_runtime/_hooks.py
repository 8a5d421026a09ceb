"""Hooks on modules and on the autograd graph. They decide nothing: they call the unit and its context.

module's forward pre-hook ---- gather, cast inputs, mark inputs (post-backward)
module's forward hook -------- free, mark outputs (pre-backward), cast outputs
output's gradient hook ------- pre-backward: gather again
inputs' gradients are there -- post-backward: free, reduce
"""

import warnings
from typing import Any

import torch
from torch import nn

from . import _torch_compat as compat
from ._labels import label
from ._tree import cast_to, map_tensors, tensors_in
from ._unit import Unit


def attach(unit: Unit) -> None:
    """Hook a unit into its modules."""
    for module in unit.modules:
        module.register_forward_pre_hook(_pre_forward(unit), prepend=True, with_kwargs=True)
        module.register_forward_hook(_post_forward(unit), always_call=True)


def _pre_forward(unit: Unit) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        with label("pre_forward", unit.name):
            return before_forward(unit, module, args, kwargs)

    return torch.compiler.disable(hook)


def _post_forward(unit: Unit) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        with label("post_forward", unit.name):
            return after_forward(unit, module, output)

    return torch.compiler.disable(hook)


def before_forward(unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """What runs ahead of a forward: the arguments to call it with."""
    context = unit.context
    recomputed = compat.in_backward()
    if not recomputed and (context.root is None or (context.root is unit and module not in unit.running)):
        context.begin_forward(unit)
        args, kwargs = _to_device(unit, args), _to_device(unit, kwargs)
    unit.running.append(module)
    if not unit.waiting_for:
        unit.waiting_for.update(unit.modules)
    context.enter_forward(unit)
    args, kwargs = _cast_inputs(unit, args), _cast_inputs(unit, kwargs)
    if torch.is_grad_enabled() and not (recomputed and unit.entered_backward):
        args, kwargs = _mark_inputs(unit, (args, kwargs))
    return args, kwargs


def after_forward(unit: Unit, module: nn.Module, output: Any) -> Any:
    """What runs behind a forward, also one that raised (`output` is None then): the output to return."""
    context = unit.context
    if module in unit.running:
        unit.running.remove(module)
    unit.waiting_for.discard(module)
    if not (compat.in_backward() and unit.entered_backward):
        if torch.is_grad_enabled():
            _mark_outputs(unit, output)
        if not unit.waiting_for or context.root is unit:
            unit.waiting_for.clear()
            context.leave_forward(unit)
    with label("cast_forward_outputs"):
        return map_tensors(cast_to(unit.mp_policy.output_dtype), output)


def _to_device(unit: Unit, tree: Any) -> Any:
    device = unit.data.device
    return map_tensors(lambda t: t if t.device == device or t.is_meta else t.to(device), tree)


def _cast_inputs(unit: Unit, tree: Any) -> Any:
    if not unit.mp_policy.cast_forward_inputs or unit.mp_policy.param_dtype is None:
        return tree
    with label("cast_forward_inputs"):
        return map_tensors(cast_to(unit.mp_policy.param_dtype), tree)


def _mark_outputs(unit: Unit, output: Any) -> None:
    """Have the unit gathered when the gradient of any output arrives."""

    def before_backward(grad: torch.Tensor) -> None:
        unit.context.enter_backward(unit)

    hook = torch.compiler.disable(before_backward)
    for tensor in tensors_in(output):
        if not tensor.requires_grad:
            continue
        if compat.is_view(tensor):
            warnings.warn(
                f"{unit.name} ({type(unit.modules[0]).__name__}) returned a view: an in-place change to it (out += x) "
                "would drop the hook that gathers parameters for backward. Use out = out + x, or return out.clone()",
                stacklevel=2,
            )
        tensor.register_hook(hook)


def _mark_inputs(unit: Unit, tree: Any) -> Any:
    """Have the unit freed and its gradients reduced when those of all inputs are there."""
    marked = [tensor for tensor in tensors_in(tree) if tensor.requires_grad]
    if not marked:
        return tree
    passed = iter(_PostBackward.apply(unit, *marked))
    return map_tensors(lambda t: next(passed) if t.requires_grad else t, tree)


class _PostBackward(torch.autograd.Function):
    """Identity; in backward it tells the unit that its inputs' gradients are there."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.unit = unit
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        unit: Unit = ctx.unit
        with label("post_backward", unit.name):
            unit.post_backward()
        return (None, *grads)
