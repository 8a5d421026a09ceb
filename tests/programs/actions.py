"""Actions: forward and backward, gradients, weights."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as states

from .layers import LENGTH, ROWS
from .models import loss_of
from .world import World, action, coin, coins, layer

# -- forward and backward --------------------------------------------------------------------------------------------


@action(weight=12, gradients=True)
def train(w: World) -> None:
    loss = w.loss()
    w.note("loss", loss)
    loss.backward()


@action(weight=10)
def step(w: World) -> None:
    w.kept.clear()
    if w.has_gradients():
        w.note_gradients()
        w.round_gradients()
        w.optimizer.step()
        w.optimizer.zero_grad()


@action(
    weight=2,
    gradients=True,
    draw=lambda rng: (rng.choice(("sync", "no sync", "no sync and shorter", "shown", "reduced")),),
)
def accumulate(w: World, how: str) -> None:
    for last in (False, False, True):
        if how != "sync":
            w.call("set_requires_gradient_sync", last or how == "reduced")
            w.call("set_is_last_backward", last or how == "shown")
        shorter = last and how == "no sync and shorter" and _has_root(w)
        w.loss(order=[0] if shorter else None).backward()


def _has_root(w: World) -> bool:
    """Whether there is a unit around a layer that does not run, which then reduces its gradients."""
    return any("" in unit.modules for unit in w.program.units)


@action(gradients=True, draw=coins(2))
def accumulate_over_replicas(w: World, others: bool, shorter: bool) -> None:
    """The sum over replicas is left to the last microbatch, which may run the first layer alone."""
    for last in (False, True):
        w.call("set_requires_all_reduce", last)
        w.call("set_is_last_backward", last or others)
        w.loss(order=[0] if last and shorter and _has_root(w) else None).backward()


@action(gradients=True)
def two_forwards(w: World) -> None:
    (w.loss() + 2 * w.loss()).backward()


@action(gradients=True, draw=coin)
def two_losses(w: World, turned: bool) -> None:
    losses = [w.loss(), w.loss()]
    for loss in losses[::-1] if turned else losses:
        loss.backward()


@action(gradients=True)
def hidden(w: World) -> None:
    """Backward of an output that leaves the head out; not of its square, which the norm keeps."""
    tokens, _, chosen = w.batch()
    w.model(tokens, chosen, head=False).sin().mean().backward()


@action(gradients=True, draw=layer)
def captured(w: World, index: int, by_hand: bool = False) -> None:
    """Backward of a layer's output, which a forward left behind; of units that are unsharded by hand."""
    w.model.captures = index % len(w.model.layers)
    w.loss()
    found, w.model.captured, w.model.captures = w.model.captured, None, None
    if found.requires_grad:
        if by_hand:
            w.each("unshard")
        found.square().mean().backward()


@action(gradients=True, draw=lambda rng: (*layer(rng), *coin(rng)))
def gradient_of_a_layer(w: World, index: int, then: bool) -> None:
    """`torch.autograd.grad` of a layer's output, then backward or not; reentrant checkpoints refuse it.

    The output that a compiled model leaves behind is not the one that its loss comes from.
    """
    if w.program.recompute == "reentrant" or w.program.compiled == "model":
        return
    w.model.captures = index % len(w.model.layers)
    loss = w.loss()
    found, w.model.captured, w.model.captures = w.model.captured, None, None
    if not found.requires_grad:
        return
    (grad,) = torch.autograd.grad(loss, [found], retain_graph=then)
    w.note("grad", grad)
    if then:
        loss.backward()


@action(gradients=True, draw=layer)
def penalty(w: World, index: int) -> None:
    """A gradient of a gradient: autograd runs twice through units, which keep their parameters in between."""
    layers = {*w.program.layers} & {"lstm", "gru", "rnn", "encoder"}
    if w.program.recompute or w.program.compiled or w.program.mesh == "tp" or layers:
        return  # torch has no right second derivatives through its tensor parallelism, and none of these layers
    w.call("set_reshard_after_backward", False)
    w.model.captures = index % len(w.model.layers)
    loss = w.loss()
    found, w.model.captured, w.model.captures = w.model.captured, None, None
    if found.requires_grad:
        (grad,) = torch.autograd.grad(loss, [found], create_graph=True)
        loss = loss + grad.square().sum()
    loss.backward()
    w.call("set_reshard_after_backward", True)


@action(gradients=True)
def twice_through(w: World) -> None:
    loss = w.loss()
    loss.backward(retain_graph=True)
    loss.backward()


@action()
def dropped(w: World) -> None:
    w.loss()


@action(draw=coin)
def keep(w: World, other: bool) -> None:
    """Forward now, backward in `release`, unless a step comes between."""
    w.kept.append(w.model(w.batch()[0], head=False).sin().sum() if other else w.loss())


@action(gradients=True)
def release(w: World) -> None:
    while w.kept:
        w.kept.pop().backward()


@action(weight=2, draw=lambda rng: (rng.choice(("no_grad", "inference_mode")), *coin(rng)))
def look(w: World, mode: str, evaluates: bool) -> None:
    w.model.train(not evaluates)
    with getattr(torch, mode)():
        w.note("loss", w.loss())
    w.model.train()


@action()
def generate(w: World) -> None:
    tokens = torch.arange(LENGTH)[None] + w.data_rank
    w.model.eval()
    with torch.no_grad():
        for _ in range(2):
            logits = w.model(tokens)[:, -1:]
            rounded = w.program.precision or w.program.quantized  # then rounding decides between two tokens
            following = tokens[:, :1] if rounded else logits.argmax(-1)
            tokens = torch.cat([tokens, following], 1)[:, 1:]
    w.model.train()
    w.note("logits", logits)


@action(gradients=True, draw=lambda rng: tuple(rng.choices(range(3), k=rng.randrange(1, 4))))
def other_layers(w: World, *order: int) -> None:
    """Run the layers in another order, some of them twice, others not at all."""
    count = len(w.model.layers)
    w.loss(order=[index % count for index in order]).backward()


@action(gradients=True, draw=layer)
def one_layer(w: World, index: int) -> None:
    """Forward and backward of a layer that is a unit, without its model."""
    found = w.program.units
    own = [
        unit
        for unit in found
        if f"layers.{index % len(w.model.layers)}" in unit.modules and len(unit.modules) == 1
    ]
    x = torch.linspace(-1, 1, ROWS * LENGTH * w.program.width).view(ROWS, LENGTH, -1) + w.data_rank
    if own and w.program.recompute == "" and any(p.requires_grad for p in w.layer(index).parameters()):
        torch.manual_seed(w.data_rank)
        with torch.set_grad_enabled(True):
            w.model.advance(index % len(w.model.layers), x * 1, (0, 1)).square().mean().backward()


@action(gradients=True)
def chunked_loss(w: World) -> None:
    """The head and its loss in parts, each with a backward of its own, where the head is a unit."""
    tokens, targets, chosen = w.batch()
    whole = w.program.ends == "" and w.program.precision != "autocast"  # which ends with the model's call
    if whole and any("head" in unit.modules for unit in w.program.units):
        found = w.model(tokens, chosen, head=False)
        leaf = found.detach().requires_grad_()
        for part, target in zip(leaf.chunk(2), targets.chunk(2), strict=True):
            (loss_of(w.model.head(part), target) / 2).backward()
        found.backward(leaf.grad)


# -- gradients -------------------------------------------------------------------------------------------------------


@action(
    weight=2, draw=lambda rng: (rng.choice((0.01, 0.5)), rng.choice((2.0, 1.0, float("inf"))), *coin(rng))
)
def clip(w: World, limit: float, kind: float, own: bool, copies: bool = False) -> None:
    """The method of this runtime's models, or torch's function."""
    if not w.has_gradients():
        return
    w.system.average(w.params)
    if (own or copies) and hasattr(w.model, "clip_grad_norm_"):
        norm = w.model.clip_grad_norm_(limit, norm_type=kind, copies=copies)
    elif (own or copies) and w.system.name == "ours":
        norm = w.system.api.clip_grad_norm_(w.params.values(), limit, norm_type=kind, copies=copies)
    else:  # of an empty tensor torch has no norm of order infinity; an empty shard is none
        trained = [param for param in w.params.values() if param.numel()]
        norm = torch.nn.utils.clip_grad_norm_(trained, limit, norm_type=kind)
    w.note("norm", norm)


@action(draw=lambda rng: (rng.choice((-1, -1, 0, 1)),))
def scaled(w: World, broken: int) -> None:
    """A step with GradScaler; on the rank `broken` the loss is infinite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    w.optimizer.zero_grad()
    w.kept.clear()
    for index in range(2):
        loss = w.loss() * (float("inf") if index == 0 and w.data_rank == broken else 1.0)
        scaler.scale(loss).backward()
        w.system.average(w.params)
        w.round_gradients()
        scaler.step(w.optimizer)
        scaler.update()
        w.optimizer.zero_grad()
    w.note("scale", scaler.get_scale())


@action(draw=coin)
def zero_grad(w: World, to_none: bool) -> None:
    w.optimizer.zero_grad(set_to_none=to_none)


@action(weight=0.5, draw=coin)
def zero_grad_of_the_model(w: World, to_none: bool) -> None:
    w.model.zero_grad(set_to_none=to_none)


@action(
    weight=1.2,
    gradients=True,
    draw=lambda rng: (
        rng.choice(("whole", "zeros_like", "Shard(0)", "Replicate", "None")),
        rng.randrange(3),
        *coin(rng),
    ),
)
def set_gradients(w: World, how: str, first: int, after: bool) -> None:
    """Set gradients of every third parameter, to which a backward adds."""
    if w.program.mesh in ("tp", "ep") or "subclass" in w.program.layers:
        how = "None"
    w.loss().backward()
    used = [p for n, p in w.named() if p.grad is not None and p.requires_grad and ".experts." not in n]
    if not after:
        w.clear_gradients()
    for param in used[first::3]:
        value = torch.full(param.shape, 0.1, dtype=param.dtype)
        if how != "zeros_like":
            value += torch.linspace(-1, 1, param.numel(), dtype=param.dtype).view(param.shape)
        param.grad = None if how == "None" else w.system.laid_out(param, value, how)
    w.loss().backward()


@action(weight=0.5, fsdp2=False, draw=coin)
def gradients_by_name(w: World, later: bool) -> None:
    """`torch.autograd.grad` of parameters, as modules hold them before a forward or after it.

    Where it is asked for sharded parameters with `allow_unused=True` it gives None, and nothing of ours is called.
    """
    if w.program.recompute == "reentrant" or "experts" in w.program.layers:  # which batches use differs
        return
    w.rest()
    w.clear_gradients()
    w.loss().backward()
    used = [name for name, param in w.named() if param.grad is not None and param.requires_grad]
    w.clear_gradients()
    params = dict(w.named())
    loss = w.loss()
    if later:
        params = dict(w.model.named_parameters())
    grads = torch.autograd.grad(loss, [params[name] for name in used])
    for name, grad in zip(used, grads, strict=True):
        params[name].grad = grad
    w.system.average(params)
    w.note_all("grad of", {name: params[name].grad for name in used})
    w.clear_gradients()
    for name in used:
        params[name].grad = None


@action(gradients=True)
def edit_gradients(w: World) -> None:
    w.loss().backward()
    w.system.average(w.params)
    for param in w.params.values():
        if param.grad is not None:
            param.grad.mul_(0.5)


@action(weight=0.5, gradients=True, draw=lambda rng: (rng.randrange(20), rng.choice((0.0, 1e30))))
def odd_gradient(w: World, index: int, value: float) -> None:
    """One gradient is zero or huge."""
    w.system.average(w.params)
    found = [param.grad for param in w.params.values() if param.grad is not None]
    if found:
        found[index % len(found)].fill_(value)


@action(weight=0.5, gradients=True)
def divide(w: World) -> None:
    """Gradients are divided by twice the number of ranks, in one backward."""
    if w.has_gradients():
        return
    ranks = dist.get_world_size() // (2 if w.program.mesh == "tp" else 1)
    w.each("set_gradient_divide_factor", 2.0 * ranks)
    w.loss().backward()
    w.each("set_gradient_divide_factor", float(ranks))
    for name, param in w.params.items():
        if param.grad is not None and (not w.units or w.program.is_plain(name)):
            param.grad.mul_(0.5)


@action(weight=0.5, gradients=True)
def all_reduce_hook(w: World) -> None:
    """A hook halves what was reduced; with it unused parameters get zeros, here None again."""
    if w.has_gradients() or w.kept:
        return
    w.each("set_all_reduce_hook", lambda flat: flat.mul_(0.5))
    w.loss().backward()
    w.each("set_all_reduce_hook", None)
    w.system.average(w.params)
    # Numbers that one process rounds to zero may be tiny where ranks' halves are added.
    grads = [(param, param.grad) for param in w.params.values() if param.grad is not None]
    for param, used in [(param, (w.full(grad).abs() > 1e-30).any()) for param, grad in grads]:
        param.grad = param.grad if used else None
    for name, param in w.params.items():
        if param.grad is not None and (not w.units or w.program.is_plain(name)):
            param.grad.mul_(0.5)


# -- weights ---------------------------------------------------------------------------------------------------------


@action(draw=lambda rng: (rng.choice(("in place", "data", "foreach", "detached")),))
def edit_weights(w: World, how: str) -> None:
    w.rest()
    params: list[torch.Tensor] = [param for _, param in w.named() if param.numel()]
    with torch.no_grad():
        if how == "foreach":
            torch._foreach_mul_(params, 0.9)
        for param in params if how != "foreach" else ():
            {"in place": param, "data": param.data, "detached": param.detach()}[how].mul_(0.9)


@action(draw=lambda rng: (rng.choice(("embed", "head", "norm", 0, 1, 2)), *coin(rng)))
def freeze(w: World, part: Any, on: bool) -> None:
    module = w.layer(part) if isinstance(part, int) else getattr(w.model, part)
    if not w.has_gradients() and not w.kept:
        for name, param in module.named_parameters():
            param.requires_grad_(not (on or w.is_fixed(name)))


@action(draw=lambda rng: (rng.choice(("embed", "head", 0, 1, 2)), *coin(rng)))
def freeze_between(w: World, part: Any, stays: bool) -> None:
    """Freeze after a forward whose backward never comes, then unfreeze or not; two steps."""
    module = w.layer(part) if isinstance(part, int) else getattr(w.model, part)
    before = [param.requires_grad for param in module.parameters()]
    if not w.has_gradients() and not w.kept:
        loss = w.loss()
        module.requires_grad_(False)
        del loss
        for param, trained in zip(module.parameters(), before, strict=True):
            param.requires_grad_(trained and not stays)
        for _ in range(2):
            one_more_step(w)


@action(weight=0.5, fsdp2=False)
def edit_full(w: World, each: bool = False) -> None:
    """Change whole parameters in place, or each parameter's full tensor, which is loaded."""
    if w.has_gradients() or w.kept:
        return
    if each:
        w.rest()
        full = {name: w.full(param).detach() for name, param in w.model.named_parameters()}
        scaled: Any = {name: value if w.is_fixed(name) else value * 1.1 for name, value in full.items()}
        options = states.StateDictOptions(full_state_dict=True, strict=False)
        states.set_model_state_dict(w.model, scaled, options=options)
        return
    whole = w.system.api.full_params(w.model) if w.units else contextlib.nullcontext()
    with whole, torch.no_grad():
        for name, param in w.model.named_parameters():
            if not w.is_fixed(name):
                param.mul_(1.1)


@action(weight=0.5, fsdp2=False)
def stream(w: World, each: bool = False) -> None:
    w.rest()
    streamed = w.units and not each
    named = w.system.api.iter_full_params(w.model) if streamed else w.model.named_parameters()
    w.note_all("streamed", dict(sorted((name, value) for name, value in named)))


@action(weight=0.5, fsdp2=False)
def sleep(w: World) -> None:
    if w.units and not w.kept:
        w.system.api.offload(w.model, w.optimizer)
        w.system.api.reload(w.model, w.optimizer)


@action(weight=0.5)
def average_of_weights(w: World) -> None:
    import block_optim

    w.rest()
    ema = block_optim.EMA(w.model, decay=0.5)
    w.loss().backward()
    step(w)
    ema.update()
    with ema.swapped():
        w.note("loss with averages", w.loss())
        w.rest()


def one_more_step(w: World) -> None:
    w.optimizer.zero_grad()
    w.loss().backward()
    step(w)
