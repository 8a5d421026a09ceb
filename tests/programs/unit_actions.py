"""Actions: units, hooks and errors."""

import contextlib
import functools
import itertools

import torch
import torch.distributed as dist

from . import state_actions  # noqa: F401 (seeds draw from its actions before these)
from .layers import LENGTH, ROWS, InPlace
from .models import OnPurpose
from .world import OPTIONS, World, action, coin, layer, local_of

ENLARGE = ("muon", "shampoo", "soap")  # optimizers that make rounding larger

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
    w.call("finalize_backward")
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


@action(weight=0.5, gradients=True)
def to_dtype(w: World) -> None:
    """Train in another dtype."""
    rounds = w.program.quantized or w.program.optimizer in ENLARGE
    if rounds or {*w.program.layers} & {"subclass", "two dtypes"}:
        return
    w.rest()
    own = torch.get_default_dtype()
    w.model.to(torch.float32 if own == torch.float64 else torch.float64)
    loss = w.loss()
    w.note("loss", loss)
    loss.backward()
    w.rest()
    w.model.to(own)


@action(
    weight=1.2,
    draw=lambda rng: (
        rng.choice(("root", "all", "one")),
        rng.randrange(5),
        rng.choice(("layer", "model", "forward")),
    ),
)
def evaluate_unsharded(w: World, which: str, index: int, how: str) -> None:
    """Units that are unsharded by hand stay so in an evaluation, of a layer, or of a model without its hooks."""
    w.rest()
    own = [
        i for i in range(len(w.model.layers)) if any(u.modules == (f"layers.{i}",) for u in w.program.units)
    ]
    layer = f"layers.{own[index % len(own)]}" if how == "layer" and own else ""
    direct = how == "forward" and which != "one" and bool(w.units) and not w.program.module_hooks
    set_by_hand = [args[0] for name, *args in w.program.actions if name == "reshard_after_forward"]
    shown: dict[str, tuple[type, torch.Tensor]] = {}  # what must stay as `unshard()` shows it
    for number, (unit, drawn) in enumerate(zip(w.units, w.program.units, strict=bool(w.units))):
        root = unit is w.model
        if which == "all" or (root if which == "root" else number == index % len(w.units)):
            before = {name: type(param) for name, param in w.model.named_parameters()}
            unit.unshard()
            runs = not direct and not layer if root else any(path.startswith(layer) for path in drawn.modules)
            reshards = any(set_by_hand) or (drawn.reshard if drawn.reshard is not None else not root)
            reshards = reshards or drawn.modules[0].endswith(".energy")  # its backward is in the forward
            for name, param in w.model.named_parameters():
                if type(param) is not before[name] and not (runs and reshards):
                    shown[name] = type(param), local_of(param).detach().clone()
    tokens, _, chosen = w.batch()
    w.model.eval()
    with torch.no_grad():
        if layer:
            x = torch.linspace(-1, 1, ROWS * LENGTH * w.program.width).view(ROWS, LENGTH, -1)
            w.note("output", w.model.advance(int(layer.removeprefix("layers.")), x, chosen))
        else:
            w.note("output", (w.model.forward if direct else w.model)(tokens, chosen))
    w.model.train()
    after = dict(w.model.named_parameters())
    changed = [
        name
        for name, (kind, value) in shown.items()
        if type(after[name]) is not kind or not torch.equal(local_of(after[name]), value)
    ]
    w.note("resharded", " ".join(changed))
    w.each("reshard")


# -- hooks and errors ------------------------------------------------------------------------------------------------


@action(gradients=True, draw=layer)
def hooks(w: World, index: int) -> None:
    """Hooks on a layer and on gradients; a compiled model calls none that come after its first forward."""
    if w.program.compiled == "model":
        return
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
    """Post-accumulate hooks run once for each parameter with a gradient, and see it."""
    w.rest()
    names: list[str] = []
    w.calls.clear()
    # A hook runs on the stream of reductions: it writes to memory of the computation's.
    grads = {name: torch.zeros_like(param) for name, param in w.params.items() if param.requires_grad}
    if "subclass" in w.program.layers:
        grads.clear()

    def see(name: str, param: torch.Tensor) -> None:
        names.append(name)
        if name in grads and param.grad is not None:
            grads[name].copy_(param.grad.to_dense() if param.grad.is_sparse else param.grad)

    handles = [
        param.register_post_accumulate_grad_hook(functools.partial(see, name))
        for name, param in w.params.items()
        if param.requires_grad
    ]
    w.loss().backward()
    for handle in handles:
        handle.remove()
    w.system.average(w.params)
    if not w.program.uneven:
        w.note("hooked", " ".join(sorted(names)))
        w.note("hooked before", " ".join(sorted(w.calls)))
        seen = {name for name in {*grads} & {*names} if w.units and not w.program.is_plain(name)}
        after = {name: w.params[name].grad for name in seen}
        unlike = [n for n, grad in after.items() if not torch.equal(local_of(grads[n]), local_of(grad))]
        w.note("hooks saw another gradient for", " ".join(sorted(unlike)))


@action(
    weight=0.6, gradients=True, fsdp2=False, draw=lambda rng: (rng.choice(("halve", "clamp")), *coin(rng))
)
def parameter_hooks(w: World, how: str, odd: bool) -> None:
    """Hooks on every second parameter replace a gradient, reduced, before it is added to the one that is there."""
    w.rest()
    replace = {"halve": lambda grad: grad * 0.5, "clamp": lambda grad: grad.clamp(-1e-3, 1e-3)}[how]
    hooked = {
        name: param
        for name, param in [*w.params.items()][odd::2]
        if param.requires_grad and not w.program.is_plain(name)  # which see this rank's gradient
    }
    calls: list[str] = []
    if w.units:
        handles = [w.hook(name, param, "register_hook", replace, calls) for name, param in hooked.items()]
        w.loss().backward()
        for handle in handles:
            handle.remove()
    else:  # the hooks get averages
        before = {name: param.grad for name, param in w.params.items()}
        w.clear_gradients()
        w.loss().backward()
        w.system.average(w.params)
        for name, param in w.params.items():
            if name in hooked and param.grad is not None:
                calls.append(name)
                param.grad = replace(param.grad)
            if (grad := before[name]) is not None:
                param.grad = grad if param.grad is None else grad + param.grad
    w.note("called", " ".join(sorted(calls)))


@action(draw=lambda rng: (*layer(rng), *coin(rng), *coin(rng)))
def fail_in_forward(w: World, index: int, with_grad: bool, says: bool) -> None:
    w.model.fails = index % len(w.model.layers)
    with contextlib.suppress(OnPurpose), torch.set_grad_enabled(with_grad):
        w.loss()
    w.model.fails = None
    if says and w.system.name == "ours":
        w.call("reset_iter_state")


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
        w.call("reset_iter_state")
    w.clear_gradients()
    w.kept.clear()


@action(weight=0, departs=True)
def other_order_on_one_rank(w: World) -> None:
    order = list(range(len(w.model.layers)))
    for _ in range(2):
        w.loss(order=order[::-1] if dist.get_rank() == 1 else order).backward()
