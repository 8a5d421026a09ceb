"""Actions: units, hooks and errors."""

import contextlib
import itertools

import torch
import torch.distributed as dist

from . import state_actions  # noqa: F401 (seeds draw from its actions before these)
from .models import InPlace, OnPurpose
from .world import OPTIONS, World, action, coin, layer

# -- units -----------------------------------------------------------------------------------------------------------


@action(draw=lambda rng: (rng.randrange(5), *coin(rng)))
def unshard(w: World, index: int, asynchronous: bool) -> None:
    if w.units:
        handle = w.units[index % len(w.units)].unshard(async_op=asynchronous)
        if asynchronous:
            handle.wait()


@action()
def reshard(w: World) -> None:
    w.each("reshard")


@action(draw=coin)
def reshard_after_forward(w: World, on: bool) -> None:
    w.call("set_reshard_after_forward", on)


@action(draw=coin)
def reshard_after_backward(w: World, on: bool) -> None:
    w.call("set_reshard_after_backward", on)


@action(weight=0.5, fsdp2=False, draw=lambda rng: (rng.randrange(4),))
def prefetch(w: World, depth: int) -> None:
    w.call("set_prefetch_depth", depth)


@action(weight=0.5)
def prefetch_by_hand(w: World) -> None:
    for one, other in itertools.pairwise(w.units):
        one.set_modules_to_forward_prefetch([other])
        other.set_modules_to_backward_prefetch([one])


@action(weight=0.5, fsdp2=False, draw=lambda rng: (rng.choice(OPTIONS), *coin(rng)))
def option(w: World, method: str, on: bool) -> None:
    w.call(method, on)


@action(weight=0.5, draw=coin)
def sum_only(w: World, on: bool) -> None:
    w.each("set_force_sum_reduction_for_comms", on)


@action(weight=0.3, gradients=True, fsdp2=False)
def end_by_hand(w: World) -> None:
    w.call("set_manual_backward_finalization", True)
    w.loss().backward()
    w.loss().backward()
    if w.units:
        w.model.finalize_backward()
    w.call("set_manual_backward_finalization", False)


@action(weight=0.3, draw=coin)
def to_empty(w: World, late: bool = False) -> None:
    """Weights are lost and loaded; buffers that are in no state dict are made anew before or after."""
    w.rest()
    for param in w.params.values():
        param.grad = None  # it would be lost too
    saved = {name: value.clone() for name, value in w.model.state_dict().items()}
    w.model.to_empty(device="cpu")
    if late:
        w.model.load_state_dict(saved)
    for name, buffer in w.model.named_buffers():
        if name not in saved:
            buffer.copy_(torch.linspace(0, 1, buffer.numel()))
    if not late:
        w.model.load_state_dict(saved)


@action(weight=0.5)
def to_device(w: World) -> None:
    w.rest()
    w.model.to("cpu")


# -- hooks and errors ------------------------------------------------------------------------------------------------


@action(gradients=True, draw=layer)
def hooks(w: World, index: int) -> None:
    """Hooks on a layer and on gradients."""
    calls: list[str] = []
    handles = [
        w.layer(index).register_forward_pre_hook(lambda *args: calls.append("pre")),
        w.layer(index).register_forward_hook(lambda *args: calls.append("post")),
    ]
    if not isinstance(
        w.layer(index), InPlace
    ):  # torch allows no change in place of what a backward hook wraps
        handles.append(w.layer(index).register_full_backward_hook(lambda *args: calls.append("backward")))
    try:
        w.loss().backward()
    finally:
        for handle in handles:
            handle.remove()
    w.note("calls", " ".join(calls))


@action(weight=0.5, gradients=True)
def accumulate_hooks(w: World) -> None:
    """Post-accumulate hooks run once for each parameter with a gradient."""
    w.rest()
    names: list[str] = []
    handles = [
        param.register_post_accumulate_grad_hook(lambda param, name=name: names.append(name))
        for name, param in w.params.items()
        if param.requires_grad
    ]
    w.loss().backward()
    for handle in handles:
        handle.remove()
    if not w.program.uneven:
        w.note("hooked", " ".join(sorted(names)))


@action(draw=lambda rng: (*layer(rng), *coin(rng), *coin(rng)))
def fail_in_forward(w: World, index: int, with_grad: bool, says: bool) -> None:
    w.model.fails = index % len(w.model.layers)
    with contextlib.suppress(OnPurpose), torch.set_grad_enabled(with_grad):
        w.loss()
    w.model.fails = None
    if says and w.system.name == "ours":
        w.model.reset_iter_state()


@action(fsdp2=False, draw=lambda rng: (*layer(rng), *coin(rng)))
def fail_in_backward(w: World, index: int, says: bool) -> None:
    """Raise in a backward; then clear all gradients."""

    def fail(gradient: torch.Tensor) -> None:
        raise OnPurpose

    w.model.captures = index % len(w.model.layers)
    loss = w.loss()
    found, w.model.captured, w.model.captures = w.model.captured, None, None
    if found.requires_grad:
        found.register_hook(fail)
        with contextlib.suppress(OnPurpose):
            loss.backward()
    del found
    del loss
    w.optimizer.zero_grad()
    if says and w.system.name == "ours":
        w.model.reset_iter_state()
    for param in w.params.values():  # also those that the optimizer does not have
        param.grad = None
    w.kept.clear()


@action(weight=0, departs=True, draw=layer)
def fail_on_one_rank(w: World, index: int) -> None:
    """One rank raises in a forward that the others end, then begins again."""
    if dist.get_rank() == 1:
        w.model.fails = index % len(w.model.layers)
        with contextlib.suppress(OnPurpose):
            w.loss()
        w.model.fails = None
    w.loss().backward()
    w.loss().backward()


@action(weight=0, departs=True)
def other_order_on_one_rank(w: World) -> None:
    order = list(range(len(w.model.layers)))
    for _ in range(2):
        w.loss(order=order[::-1] if dist.get_rank() == 1 else order).backward()
