"""Actions: exceptions in a user's code, and training after them."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .layers import InPlace
from .models import OnPurpose
from .module_hooks import changed
from .world import TIMEOUT, Late, World, action, coin, layer

# The method of a layer that registers a hook there.
HOOKS = {
    "pre hook": "register_forward_pre_hook",
    "recomputation": "register_forward_pre_hook",
    "forward hook": "register_forward_hook",
    "backward hook": "register_full_backward_hook",
    "backward pre hook": "register_full_backward_pre_hook",
}
# The method of a parameter.
OF_PARAMETERS = {
    "gradient hook": "register_hook",
    "accumulate hook": "register_post_accumulate_grad_hook",
}
PLACES = (*HOOKS, *OF_PARAMETERS, "child", "function", "loss", "step hook")
ON_ONE_RANK = ("forward", "forward hook", "function", "backward hook", "evaluation")


class Fails(torch.autograd.Function):
    """Identity, whose backward calls a function."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, fail: Callable[[], None]) -> torch.Tensor:
        ctx.fail = fail
        return tensor * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.fail()
        return grad, None


def fail_at(w: World, place: str, index: int, fail: Callable[..., None]) -> Any:
    """Let a layer, or the optimizer, call a function; returns a handle, None where torch has no such place."""
    module = w.layer(index)
    prefix = f"layers.{index % len(w.model.layers)}."
    if w.program.compiled or ("backward" in place and isinstance(module, InPlace)):
        return None
    if place in HOOKS:
        return getattr(module, HOOKS[place])(fail)
    if place == "child":
        leaves = [child for child in module.modules() if child is not module and not [*child.children()]]
        return [*leaves, module][0].register_forward_pre_hook(fail)
    if place in OF_PARAMETERS:
        trained = [p for name, p in w.params.items() if name.startswith(prefix) and p.requires_grad]
        return getattr(trained[0], OF_PARAMETERS[place])(fail) if trained else None
    if place == "step hook":
        return w.optimizer.register_step_pre_hook(fail)
    fails: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: Fails.apply(tensor, fail)  # noqa: E731
    return module.register_forward_hook(
        lambda module, args, output: changed(output, fails) if place == "function" else None
    )


@action(
    weight=3,
    gradients=True,
    fsdp2=False,
    draw=lambda rng: (
        rng.choice(PLACES),
        *layer(rng),
        *coin(rng),
        rng.choice(("plain", "reentrant")),
        rng.choice(("error", "error", "interrupt")),
    ),
)
def fail_and_repeat(w: World, place: str, index: int, says: bool, recompute: str, how: str = "error") -> None:
    """Raise in a user's code that runs within a unit, then run the same batch again."""
    changes = {"batch norm", "spectral norm", "old spectral norm"} & {*w.program.layers}
    if changes and (w.program.recompute or recompute == "reentrant"):
        return  # a recomputation updates its buffers; whether it comes before a hook of a parameter is not defined

    def fail(*args: object) -> None:
        calls.append(None)
        if len(calls) > (place == "recomputation"):
            raise KeyboardInterrupt if how == "interrupt" else OnPurpose

    calls: list[None] = []
    before, raised = w.model.recompute, False
    handle = fail_at(w, place, index, fail)
    if handle is None:
        return
    if place == "recomputation":
        w.model.recompute = recompute
    w.rest()
    try:
        loss = w.loss()
        if place == "loss":
            fail()
        loss.backward()
        if place == "step hook":
            w.optimizer.step()
    except (OnPurpose, KeyboardInterrupt):
        raised = True
    handle.remove()
    w.model.recompute = before
    if not w.program.uneven:
        w.note("raised", raised)
    if says and w.system.name == "ours":
        w.call("reset_iter_state")
    w.clear_gradients()
    w.batches -= 1
    loss = w.loss()
    w.note("loss", loss)
    loss.backward()


@action(weight=0, departs=True, draw=lambda rng: (*layer(rng), rng.choice(ON_ONE_RANK)))
def fail_on_one_rank(w: World, index: int, place: str = "forward") -> None:
    """One rank raises in a forward, a backward or an evaluation that the others end, then begins again."""

    began = float("inf")

    def fail(*args: object) -> None:
        nonlocal began
        began = time.monotonic()
        raise OnPurpose

    evaluates, alone = place == "evaluation", dist.get_rank() == 1
    w.rest()
    w.clear_gradients()
    hook = "child" if place in ("forward", "evaluation") else place
    handle = fail_at(w, hook, index, fail) if alone else None
    if alone or evaluates:
        with contextlib.suppress(OnPurpose), torch.set_grad_enabled(not evaluates):
            loss = w.loss()
            if not evaluates:
                loss.backward()
    if handle is not None:
        handle.remove()
    if alone:
        if (waited := time.monotonic() - began) > TIMEOUT / 2:
            raise Late(f"{waited:.1f} s from an exception until its caller had it")
        w.clear_gradients()
    w.loss().backward()
    w.loss().backward()
