"""Actions: ways of calling autograd, and what a user does between a forward and its backward."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from .models import loss_of
from .world import World, action, coin, layer

# -- roots and inputs ------------------------------------------------------------------------------------------------


def embedded(w: World) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    """Embeddings as a leaf, the model's logits as a function of them, and targets."""
    tokens, targets, chosen = w.batch()
    leaf = torch.linspace(-1, 1, tokens.numel() * w.program.width).view(*tokens.shape, -1) + w.data_rank
    return leaf.requires_grad_(), lambda x: w.model(tokens, chosen, embeds=x), targets


@action(
    weight=1.5,
    gradients=True,
    draw=lambda rng: (rng.choice(("embeddings", "layer")), *layer(rng), *coin(rng)),
)
def backward_of_inputs(w: World, of: str, index: int, then: bool) -> None:
    """`backward(inputs=)`: only embeddings, or a layer's output, get a gradient; then all do, or not."""
    if w.program.recompute == "reentrant":  # which refuses it
        return
    w.model.captures = index % len(w.model.layers)
    leaf, logits_of, targets = embedded(w)
    loss = loss_of(logits_of(leaf), targets)
    found, w.model.captured, w.model.captures = w.model.captured, None, None
    wanted = leaf if of == "embeddings" else found
    loss.backward(inputs=[wanted], retain_graph=then)
    w.note("grad", wanted.grad)
    if then:
        loss.backward()
        w.note("grad again", leaf.grad)


@action(weight=0.7, gradients=True, draw=coin)
def gradient_of_inputs(w: World, then: bool) -> None:
    """`torch.autograd.grad` of embeddings, then backward or not."""
    if w.program.recompute == "reentrant":
        return
    leaf, logits_of, targets = embedded(w)
    loss = loss_of(logits_of(leaf), targets)
    (grad,) = torch.autograd.grad(loss, [leaf], retain_graph=then)
    w.note("grad", grad)
    if then:
        loss.backward()


@action(weight=0.7, gradients=True, draw=lambda rng: (rng.choice(("rows", "losses", "layer")), *layer(rng)))
def several_roots(w: World, which: str, index: int) -> None:
    """One backward of parts of an output, of two losses, or of a loss and a layer's output."""
    if which == "rows":
        tokens, _, chosen = w.batch()
        rows = w.model(tokens, chosen).unbind(0)
        torch.autograd.backward(rows, [torch.ones_like(row) * (i + 1) / 8 for i, row in enumerate(rows)])
    elif which == "losses":
        torch.autograd.backward([w.loss(), w.loss()])
    else:
        w.model.captures = index % len(w.model.layers)
        loss = w.loss()
        found, w.model.captured, w.model.captures = w.model.captured, None, None
        torch.autograd.backward([loss, *([found.square().mean()] if found.requires_grad else [])])


@action(
    weight=1.0,
    gradients=True,
    draw=lambda rng: (rng.choice(("one by one", "vectorized", "jacrev")), *coin(rng)),
)
def jacobian(w: World, how: str, then: bool) -> None:
    """Derivatives of some logits by embeddings, then a backward or not."""
    # torch has no random numbers, statistics, recomputations, RNNs, subclasses or DTensors in batches.
    layers = {*w.program.layers} & {"batch norm", "dropout", "lstm", "gru", "rnn", "subclass"}
    apart = layers or w.program.recompute or w.program.compiled or w.program.mesh in ("tp", "ep")
    if w.program.recompute == "reentrant" or (how != "one by one" and apart):
        return
    leaf, logits_of, _ = embedded(w)
    some: Callable[[torch.Tensor], torch.Tensor] = lambda x: logits_of(x)[0, :2, 0]  # noqa: E731
    if how == "jacrev":
        w.note("jacobian", torch.func.jacrev(some)(leaf.detach()))
    else:
        found = torch.autograd.functional.jacobian(some, leaf.detach(), vectorize=how == "vectorized")
        w.note("jacobian", found)
    if then:
        some(leaf).sum().backward()


@action(weight=0.7, gradients=True)
def three_times_through(w: World) -> None:
    loss = w.loss()
    for last in (False, False, True):
        loss.backward(retain_graph=not last)


# -- modes -----------------------------------------------------------------------------------------------------------


SAVES: dict[str, Callable[[], Any]] = {
    "save_on_cpu": save_on_cpu,
    "copies": lambda: saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor),
    "itself": lambda: saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
}


@action(gradients=True, draw=lambda rng: (rng.choice(list(SAVES)), *coin(rng)))
def saved_tensors(w: World, how: str, backward_too: bool) -> None:
    """Hooks of tensors that autograd saves; a backward runs within them or after them."""
    with SAVES[how]():
        loss = w.loss()
        if backward_too:
            loss.backward()
    if not backward_too:
        loss.backward()


@action(weight=0.5, gradients=True, draw=coin)
def anomaly(w: World, backward_alone: bool) -> None:
    """Training while autograd looks for NaN, which DTensors do not have, and notes where operations come from."""
    loss = w.loss() if backward_alone else None
    with torch.autograd.set_detect_anomaly(True, check_nan=w.program.mesh not in ("tp", "ep")):
        (w.loss() if loss is None else loss).backward()


@action(weight=0.9, gradients=True, draw=lambda rng: (rng.choice(("all", "some", "layer")), *layer(rng)))
def functional_call(w: World, which: str, index: int) -> None:
    """A call with the parameters that the model has: all, every second, or a layer's."""
    if w.program.recompute:  # it would run after the call, with what modules held before
        return
    own = dict(w.model.named_parameters())
    if which == "layer":
        own = {name: own[name] for name in own if name.startswith(f"layers.{index % len(w.model.layers)}.")}
    params = {name: own[name] for name in [*own][:: 2 if which == "some" else 1]}
    tokens, targets, chosen = w.batch()
    loss_of(torch.func.functional_call(w.model, params, (tokens, chosen)), targets).backward()


@action(weight=0.7, gradients=True, draw=coin)
def backward_in_a_thread(w: World, forward_too: bool) -> None:
    """A thread that is joined runs the backward, and the forward or not."""
    errors: list[BaseException] = []
    loss = None if forward_too else w.loss()
    dtype = torch.get_default_dtype()

    def work() -> None:
        try:
            torch.set_default_dtype(dtype)
            (w.loss() if loss is None else loss).backward()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


# -- between a forward and its backward ------------------------------------------------------------------------------

SETTINGS = (
    "set_reshard_after_forward",
    "set_reshard_after_backward",
    "set_requires_gradient_sync",
    "set_is_last_backward",
)
BETWEEN = ("state_dict", "zero_grad", "evaluate", "drop", *SETTINGS)


@action(weight=3.5, gradients=True, draw=lambda rng: (rng.choice(BETWEEN), *coin(rng)))
def between(w: World, what: str, on: bool) -> None:
    """Read a state dict, clear gradients, run another forward or change a setting before a backward."""
    loss = w.loss()
    if what == "state_dict":
        w.note_all("saved", {n: v for n, v in w.model.state_dict().items() if not w.is_codes(n)})
    elif what == "zero_grad":
        (w.model if on else w.optimizer).zero_grad(set_to_none=False)
    elif what == "drop":
        w.loss()
    elif what == "evaluate":
        w.model.train(on)
        with torch.no_grad():
            w.note("loss", w.loss())
        w.model.train()
    else:
        w.call(what, on)
    loss.backward()
    if what in SETTINGS[2:] and not on:
        w.call(what, True)
        w.loss().backward()
