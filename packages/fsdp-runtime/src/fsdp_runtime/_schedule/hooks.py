"""Hooks on modules and on the autograd graph. They cast and mark tensors; when to gather and reduce the pass decides.

module's forward pre-hook ---- gather, cast inputs, mark inputs (post-backward)
module's forward hook -------- free, mark outputs (pre-backward), cast outputs
output's gradient hook ------- pre-backward: gather again
parameter's gradient hook ---- the gradient is kept for the reduction
inputs' gradients are there -- post-backward: free, reduce
"""

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from .. import _torch_compat as compat
from .._params.unit import Param, Unit, label
from .._torch.tree import cast_to, map_tensors, tensors_behind, tensors_in
from .model import Member, owner_of

_PLAIN = (torch.Tensor, nn.Parameter)


def attach(member: Member) -> None:
    """Hook a unit into its modules."""
    # Of each forward under way: the exception that its caller is handling, and the number of its first autograd node.
    begun: list[tuple[BaseException | None, int]] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        begun.append((sys.exception(), compat.next_node()))
        with label("pre_forward", member.unit.name):
            return before_forward(member, module, args, kwargs)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        handled, first_node = begun.pop() if begun else (None, 0)
        if sys.exception() is not handled:  # the forward has raised it
            abandon_forward(member, module)
            return output
        with label("post_forward", member.unit.name):
            return after_forward(member, module, output, first_node)

    before, after = torch.compiler.disable(before), torch.compiler.disable(after)
    for module in member.unit.modules:
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)
        module.register_state_dict_pre_hook(lambda *_: member.passes.before_save())


def before_forward(member: Member, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Run before a forward. Returns the arguments to call it with."""
    unit, passes = member.unit, member.passes
    compat.outside_transforms(passes.abandon_interrupted, unit, module, call_method.__code__)
    if passes.is_begun_by(unit, module):
        member.begin()
        compat.outside_transforms(passes.begin_forward, unit)
        device = unit.data.device
        args, kwargs = map_tensors(
            lambda t: t if t.device == device or t.is_meta else t.to(device), (args, kwargs)
        )
    recomputed = compat.outside_transforms(passes.enter_forward, unit, module)
    policy = unit.mp_policy
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        with label("cast_forward_inputs"):
            args, kwargs = map_tensors(cast_to(policy.param_dtype), (args, kwargs))
    # Of a list of modules the first one is the last that backward reaches; of methods inside methods the outer one.
    outer = unit.first is module and len(unit.entered) == 1
    if torch.is_grad_enabled() and not recomputed and (outer or unit.host is not None):
        marked = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if marked:  # free the unit and reduce its gradients when the gradients of all inputs are computed
            passed = iter(_PostBackward.apply(member, *marked))
            args, kwargs = map_tensors(lambda t: next(passed) if t.requires_grad else t, (args, kwargs))
    return args, kwargs


def call_method(self: nn.Module, member: Member, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a method of a module as its forward is called."""
    before, after = (torch.compiler.disable(f) for f in (before_forward, after_forward))
    first_node = compat.next_node()
    args, kwargs = before(member, self, args, kwargs)
    try:
        output = method(*args, **kwargs)
    except BaseException:
        abandon_forward(member, self)
        raise
    return after(member, self, output, first_node)


def abandon_forward(member: Member, module: nn.Module) -> None:
    """Run instead of `after_forward` while an exception leaves a forward. Waits for nothing."""
    compat.outside_transforms(member.passes.abandon_forward, member.unit, module)


def after_forward(member: Member, module: nn.Module, output: Any, first_node: int = 0) -> Any:
    """Run after a forward, whose autograd nodes have numbers from `first_node` on (0: unknown). Returns the output."""
    unit, passes = member.unit, member.passes
    recomputed = compat.outside_transforms(passes.leave_forward, unit, module)
    if compat.transforming():
        _refuse_freed(unit, map(compat.innermost, () if recomputed else tensors_in(output)))
        if torch.is_grad_enabled() and not recomputed:
            _mark_outputs(member, tensors_in(output))
            output = map_tensors(_marker(member), output)
    elif not recomputed:
        inside, behind = tensors_in(output), tensors_behind(output)
        outputs = [*inside, *behind]
        _refuse_freed(unit, outputs)
        # An object may hold tensors of other units too, as a cache that all layers pass on.
        new = (tensor for tensor in behind if compat.node_number(tensor) >= first_node)
        marked = torch.is_grad_enabled() and _mark_outputs(member, [*inside, *new])
        if not marked and compat.backward_id() == -1:
            # With gradients a loss may be out of sight.
            passes.rest(free=not (torch.is_grad_enabled() or unit.shares_memory_with(outputs)))
    dtype = unit.mp_policy.output_dtype
    if dtype is None:
        return output
    with label("cast_forward_outputs"):
        return map_tensors(cast_to(dtype), output)


def gradient_hook(param: Param) -> Callable[[torch.Tensor], None]:
    """A hook for an unsharded parameter, which writes its gradient into a buffer.

    It holds nothing: autograd keeps it where the garbage collector does not see a cycle.
    """
    known = weakref.ref(param)

    def hook(unsharded: torch.Tensor) -> None:
        param = known()
        if param is not None:
            owner = owner_of(param)
            passes = owner.passes
            if not passes.in_backward:  # the graph does not include a unit's output
                passes.begin_backward()
            passes.backward.accept(owner.unit, param)

    return hook


def _refuse_freed(unit: Unit, outputs: Iterable[torch.Tensor]) -> None:
    """Raise RuntimeError for an output in memory of a parameter that the unit's forward has freed."""
    for tensor in outputs:
        plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
        if plain and tensor.numel() and not tensor.untyped_storage().nbytes():
            raise RuntimeError(
                f"{unit.name} ({type(unit.modules[0]).__name__}) returned memory of one of its parameters, freed after "
                "its forward. Call set_reshard_after_forward(False, recurse=False) on it, or return parameter.clone()"
            )


def _mark_outputs(member: Member, outputs: Iterable[torch.Tensor]) -> bool:
    """Gather the unit when the gradient of any output is computed. Returns whether any requires a gradient."""
    marks: _Marks | None = None
    for tensor in outputs:
        if not tensor.requires_grad or tensor.is_leaf:  # a leaf would keep the hook for good
            continue
        if marks is None:
            marks = _Marks(member)
        tensor.register_hook(marks.enter)
        node = compat.node_of_base(tensor)
        if node is not None:
            # An in-place change of a view (out += x) replaces its node, and with it the hook. It keeps the base's node:
            # https://docs.pytorch.org/docs/stable/notes/autograd.html
            node.register_prehook(marks.enter_once)
    if marks is not None and member.passes.is_idle:
        member.passes.follow_graph(marks)
    return marks is not None


class _Marks:
    """Hooks of one forward's outputs. Only the graph holds them, so that they go with it."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._run = -1  # the last run of the autograd engine that called `enter`

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter(self, _: Any) -> None:
        """Gather the unit for backward."""
        self._run = compat.backward_id()
        if compat.transforming():
            compat.outside_transforms(self._member.passes.enter_backward, self._member.unit)
        else:
            self._member.passes.enter_backward(self._member.unit)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter_once(self, _: Any) -> None:
        """Gather the unit, unless this backward has called `enter`."""
        if self._run != compat.backward_id():
            self.enter(_)


def _marker(member: Member) -> Callable[[torch.Tensor], torch.Tensor]:
    """Marks an output inside a transform of torch.func, which may not show that it requires a gradient."""

    def mark(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad or not tensor.is_floating_point():
            return tensor
        marked: torch.Tensor = _PreBackward.apply(member, tensor)
        return marked

    return mark


def _second_backward(member: Member) -> Callable[[torch.Tensor], None]:
    """The hook that autograd calls when a backward through a unit's backward begins: it gathers the parameters again.

    It raises RuntimeError if they were changed since, as torch does for a plain model.
    """
    unit, marks = member.unit, _Marks(member)
    before = unit.versions

    def enter(grad: torch.Tensor) -> None:
        if unit.versions != before:
            raise RuntimeError(
                f"{unit.name} ({type(unit.modules[0]).__name__}): its parameters were changed between a backward with "
                "create_graph=True and the backward through it, which needs their values from before. Call "
                "optimizer.step() after both"
            )
        marks.enter(grad)

    return enter


class _PreBackward(torch.autograd.Function):
    """Identity; its backward runs when a gradient has reached the output."""

    generate_vmap_rule = True

    @staticmethod
    def forward(member: Member, output: torch.Tensor) -> torch.Tensor:
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.member = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        _Marks(ctx.member).enter(grad)
        return None, grad

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: torch.Tensor | None) -> torch.Tensor | None:
        # Of the tangent a gradient may come back too.
        return None if tangent is None else _PreBackward.apply(ctx.member, tangent)


class _PostBackward(torch.autograd.Function):
    """Identity; its backward runs when the inputs' gradients are computed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(member: Member, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.member = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        member: Member = ctx.member
        with label("post_backward", member.unit.name):
            compat.outside_transforms(member.passes.leave_backward, member.unit)
        if torch.is_grad_enabled():  # create_graph
            for grad in grads:
                if grad is not None and grad.requires_grad:
                    grad.register_hook(_second_backward(member))
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tangents
