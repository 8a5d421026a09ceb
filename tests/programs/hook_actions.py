"""Actions: hooks that change values, and optimizers that step within a backward."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .models import loss_of
from .module_hooks import MODULE_HOOKS, PLACES, modules_at, register
from .world import World, action, coin, layer


@action(
    weight=3,
    gradients=True,
    draw=lambda rng: (rng.choice(list(MODULE_HOOKS)), rng.choice(PLACES), *layer(rng)),
)
def change_by_hooks(w: World, kind: str, place: str, index: int) -> None:
    """Hooks of a module replace what it gets, what it returns, or gradients."""
    modules = modules_at(w.model, place)
    handles = register(modules[index % len(modules)], kind, w.program)
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
    if any(w.program.is_plain(name) for name in w.params):
        return  # nobody averages these before a hook runs
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


@action(weight=0, departs=True)
def norms_in_hooks(w: World) -> None:
    """Hooks of gradients communicate; one rank chooses no experts, and has no gradients of theirs."""
    norms: dict[str, float] = {}

    def see(name: str, param: nn.Parameter) -> None:
        norms[name] = float(w.full(param.grad.norm()))

    w.rest()
    w.clear_gradients()
    trained = {name: param for name, param in w.named() if param.requires_grad}
    handles = [
        param.register_post_accumulate_grad_hook(functools.partial(see, name))
        for name, param in trained.items()
        if w.units
    ]
    tokens, targets, _ = w.batch()
    loss_of(w.model(tokens, () if dist.get_rank() == 1 else (0, 1)), targets).backward()
    for handle in handles:
        handle.remove()
    w.system.average(w.params)
    for name, param in trained.items() if not w.units else ():
        if param.grad is not None:
            see(name, param)
    w.note("norms", " ".join(f"{name} {norm:.6g}" for name, norm in sorted(norms.items())))
