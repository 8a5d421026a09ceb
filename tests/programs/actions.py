"""Actions of users between two updates. An action is a function of a `World`; its arguments are drawn with the program.

    @action(weight=2, draw=lambda rng: (rng.randrange(3),))
    def one_layer(w, index): ...

A `World` is a program's model, optimizer and trace on one system; on a system that does not shard it has no units, and
`w.each` and `w.call` do nothing.
"""

import contextlib
import dataclasses
import importlib
import io
import itertools
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states

from .models import LENGTH, ROWS, VOCABULARY, InPlace, OnPurpose, loss_of

OPTIONS = ("set_keep_unsharded_storage", "set_separate_reduce_scatter_group")
OPTIMIZERS = ("block adamw", "adamw8bit", "muon", "shampoo", "soap")  # beside torch's


@dataclass(frozen=True)
class Kind:
    """An action.

    Attributes:
        run: called with the world and the arguments.
        weight: how often it is drawn.
        draw: its arguments.
        gradients: whether it leaves gradients, so that a step may follow.
        fsdp2: whether FSDP2 has what it needs.
        departs: whether one rank leaves the order of the others.
    """

    run: Callable[..., None]
    weight: float
    draw: Callable[[random.Random], tuple[Any, ...]]
    gradients: bool
    fsdp2: bool
    departs: bool


ACTIONS: dict[str, Kind] = {}


def action(
    weight: float = 1.0,
    draw: Callable[[random.Random], tuple[Any, ...]] = lambda rng: (),
    gradients: bool = False,
    fsdp2: bool = True,
    departs: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enter a function in `ACTIONS`."""

    def enter(run: Callable[..., None]) -> Callable[..., None]:
        ACTIONS[run.__name__] = Kind(run, weight, draw, gradients, fsdp2, departs)
        return run

    return enter


def layer(rng: random.Random) -> tuple[int]:
    """Draw the number of a layer; actions take it modulo the number of layers."""
    return (rng.randrange(3),)


def coin(rng: random.Random) -> tuple[bool]:
    """Draw yes or no."""
    return (rng.random() < 0.5,)


def coins(count: int) -> Callable[[random.Random], tuple[bool, ...]]:
    """Draw several."""
    return lambda rng: tuple(rng.random() < 0.5 for _ in range(count))


class World:
    """A program's model and optimizer on one system, and what it does there.

    Attributes:
        params: parameters as `fully_shard` left them, by name; gradients are theirs.
        trace: what was looked at: a label and a value, the same labels on each system.
        kept: losses whose backward is yet to come.
    """

    def __init__(self, program: Any, system: Any, model: Any, optimizer: Callable[[Any], Any]):
        self.program, self.system, self.model = program, system, model
        self.units: list[Any] = []
        self.make_optimizer, self.where = optimizer, "wrap"
        self.trace: list[tuple[str, Any]] = []
        self.kept: list[torch.Tensor] = []
        self.batches = 0

    def build(self) -> None:
        """Shard the model and make the optimizer."""
        self.units = self.system.wrap(self.model, self.program)
        self.params: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        self.optimizer = self.make_optimizer(self.named())

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters, frozen ones too, without those that are kept as NF4 codes."""
        return [(name, param) for name, param in self.params.items() if not self.is_codes(name)]

    def is_codes(self, name: str) -> bool:
        """Whether a parameter is kept as NF4 codes, which are not trained."""
        return self.program.quantized == "nf4" and "frozen.w" in name

    # -- the trace ----------------------------------------------------------------------------------------------------

    def note(self, label: str, value: Any) -> None:
        """Add a tensor's full value, a number or text to the trace."""
        if isinstance(value, torch.Tensor):
            value = self.full(value).detach().clone()
        self.trace.append((f"{self.where}: {label}", value))

    def note_all(self, label: str, tensors: dict[str, Any]) -> None:
        """Note each of some tensors."""
        for name, tensor in tensors.items():
            self.note(f"{label} {name}", tensor)

    def note_gradients(self) -> None:
        """Average gradients where the system does not, and note them."""
        self.system.average(self.params)
        self.note_all("grad of", {name: param.grad for name, param in self.params.items()})

    def round_gradients(self) -> None:
        """Leave 30 binary places of gradients: sums in another order give optimizers the same bits."""
        for param in self.params.values():
            if param.grad is not None and not self.program.precision:
                param.grad.mul_(2.0**30).round_().div_(2.0**30)

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's full value; collective."""
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    # -- computation --------------------------------------------------------------------------------------------------

    @property
    def data_rank(self) -> int:
        """Whose batches this rank has: ranks of tensor parallelism share them."""
        return dist.get_rank() // 2 if self.program.mesh == "tp" else dist.get_rank()

    def batch(self) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """The next batch of this rank: tokens, targets, and the experts that it runs."""
        self.batches += 1
        common = random.Random(1000 * self.program.seed + self.batches)
        own = random.Random(100_000 * self.program.seed + 10 * self.batches + self.data_rank)
        tokens, targets = (torch.tensor(own.choices(range(VOCABULARY), k=ROWS * LENGTH)) for _ in range(2))
        torch.manual_seed(own.randrange(2**30))  # of dropout
        drawn = own if self.program.uneven else common
        chosen = drawn.choices(range(2), k=drawn.randrange(4))
        return tokens.view(ROWS, LENGTH), targets.view(ROWS, LENGTH), chosen

    def loss(self, **options: Any) -> torch.Tensor:
        """The loss of the next batch."""
        tokens, targets, chosen = self.batch()
        return loss_of(self.model(tokens, chosen, **options), targets)

    def has_gradients(self) -> bool:
        """Whether any parameter has one."""
        return any(param.grad is not None for param in self.params.values())

    def layer(self, index: int) -> nn.Module:
        """A layer, by a number that may be too large."""
        return self.model.layers[index % len(self.model.layers)]

    def call(self, method: str, *args: Any) -> None:
        """Call a method of the sharded model."""
        if self.units:
            getattr(self.model, method)(*args)

    def each(self, method: str, *args: Any) -> None:
        """Call a method of each unit."""
        for unit in self.units:
            getattr(unit, method)(*args)

    def rest(self) -> None:
        """Let modules hold the sharded parameters."""
        self.kept.clear()
        self.each("reshard")

    def same_buffers(self) -> None:
        """Give all ranks the buffers of the first."""
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)

    def spoil(self) -> None:
        """Lose all weights."""
        with torch.no_grad():
            for _, param in self.named():
                param.mul_(0.0)

    def elsewhere(self, where: str) -> tuple["World", Any]:
        """The program's model and optimizer anew, and the group of its ranks; None: each rank has plain modules.

        Args:
            where: "part": on half of the ranks, or on one; "mesh": on another mesh, if there is one.
        """
        program, system, sharded = self.program, self.system, bool(self.units) and where != "plain"
        if not sharded or program.mesh == "tp":
            system, sharded = importlib.import_module("tests.programs.systems").System(), False
        elif where == "part" or dist.get_world_size() < 4:
            program = dataclasses.replace(program, mesh="part")
        else:
            program = dataclasses.replace(program, mesh="shard" if program.mesh != "shard" else "hsdp")
        model = type(self.model)(program.layers, program.width, program.ends, program.recompute)
        for name, param in model.named_parameters():
            param.requires_grad_(self.params[name].requires_grad)
        world = World(program, system, model, lambda named: of_groups(self.optimizer, dict(named)))
        world.build()
        first: Any = next(iter(world.params.values()))
        parts = first.device_mesh if program.mesh == "part" else None
        return world, parts.get_group() if parts else dist.group.WORLD if sharded else None

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """A folder that all ranks see, of this action."""
        paths: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(paths)
        yield Path(paths[0])
        dist.barrier()
        if dist.get_rank() == 0:
            for path in sorted(Path(paths[0]).rglob("*"), reverse=True):
                path.unlink() if path.is_file() else path.rmdir()
            Path(paths[0]).rmdir()


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


@action(weight=2, gradients=True, draw=lambda rng: (rng.choice(("sync", "no sync", "shown", "reduced")),))
def accumulate(w: World, how: str) -> None:
    for last in (False, False, True):
        if how != "sync":
            w.call("set_requires_gradient_sync", last or how == "reduced")
            w.call("set_is_last_backward", last or how == "shown")
        w.loss().backward()


@action(gradients=True, draw=coins(2))
def accumulate_over_replicas(w: World, others: bool, shorter: bool) -> None:
    """The sum over replicas is left to the last microbatch, which may run the first layer alone."""
    for last in (False, True):
        w.call("set_requires_all_reduce", last)
        w.call("set_is_last_backward", last or others)
        w.loss(order=[0] if last and shorter else None).backward()


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
def captured(w: World, index: int) -> None:
    """Backward of a layer's output, which a forward left behind."""
    w.model.captures = index % len(w.model.layers)
    w.loss()
    found, w.model.captured, w.model.captures = w.model.captured, None, None
    if found.requires_grad:
        found.square().mean().backward()


@action(gradients=True, draw=lambda rng: (*layer(rng), *coin(rng)))
def gradient_of_a_layer(w: World, index: int, then: bool) -> None:
    """`torch.autograd.grad` of a layer's output, then backward or not; reentrant checkpoints refuse it."""
    if w.program.recompute == "reentrant":
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
    if w.program.recompute or w.program.mesh == "tp" or "compiled" in w.program.layers:
        return  # torch has no right second derivatives through its tensor parallelism, and none of compiled graphs
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
    if w.program.ends == "" and any("head" in unit.modules for unit in w.program.units):
        found = w.model(tokens, chosen, head=False)
        leaf = found.detach().requires_grad_()
        for part, target in zip(leaf.chunk(2), targets.chunk(2), strict=True):
            (loss_of(w.model.head(part), target) / 2).backward()
        found.backward(leaf.grad)


# -- gradients -------------------------------------------------------------------------------------------------------


@action(
    weight=2, draw=lambda rng: (rng.choice((0.01, 0.5)), rng.choice((2.0, 1.0, float("inf"))), *coin(rng))
)
def clip(w: World, limit: float, kind: float, own: bool) -> None:
    """The method of this runtime's models, or torch's function."""
    if not w.has_gradients():
        return
    w.system.average(w.params)
    if own and hasattr(w.model, "clip_grad_norm_"):
        norm = w.model.clip_grad_norm_(limit, norm_type=kind)
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
    if not w.units:
        for param in w.params.values():
            if param.grad is not None:
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
    for param in w.params.values():
        if param.grad is not None:
            param.grad = param.grad if w.full(param.grad).any() else None
    for param in w.params.values() if not w.units else ():
        if param.grad is not None:
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
            param.requires_grad_(not (on or w.is_codes(name)))


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
            _one_more_step(w)


@action(weight=0.5, fsdp2=False)
def edit_full(w: World) -> None:
    """Change whole parameters in place."""
    if w.has_gradients() or w.kept:
        return
    whole = w.system.api.full_params(w.model) if w.units else contextlib.nullcontext()
    with whole, torch.no_grad():
        for name, param in w.model.named_parameters():
            if not w.is_codes(name):
                param.mul_(1.1)


@action(weight=0.5, fsdp2=False)
def stream(w: World) -> None:
    w.rest()
    named = w.system.api.iter_full_params(w.model) if w.units else w.model.named_parameters()
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


# -- checkpoints -----------------------------------------------------------------------------------------------------


@action(draw=lambda rng: (rng.choice(("load", "assign", "and back", "not strict")),))
def state_dict(w: World, how: str) -> None:
    """Scaled values are loaded; "and back": assigned for an evaluation, then the ones before are put back."""
    w.rest()
    found = w.model.state_dict()
    w.note_all("saved", {name: value for name, value in found.items() if not w.is_codes(name)})
    scaled_down = {n: v * 0.9 if v.is_floating_point() else v for n, v in found.items()}
    if how == "not strict":
        scaled_down.pop("norm.bias")
    assign = how in ("assign", "and back")
    w.model.load_state_dict(scaled_down, strict=how != "not strict", assign=assign)
    w.model.tie()
    if how == "and back":
        with torch.no_grad():
            w.note("loss", w.loss())
        w.rest()
        w.model.load_state_dict(found, assign=True)
        w.model.tie()
    if assign:
        w.params = dict(w.model.named_parameters())
        w.optimizer = w.make_optimizer(w.named())


@action(draw=coin)
def full_state_dict(w: World, both: bool) -> None:
    """Full state dicts, out and in again after weights have changed: this runtime's functions, else torch's."""
    w.rest()
    w.optimizer.zero_grad()
    options = states.StateDictOptions(full_state_dict=True, strict=False)
    ours = w.system.name == "ours"
    if ours:
        api = importlib.import_module("fsdp_runtime.checkpoint")
        model = api.get_full_state_dict(w.model, rank0_only=False)
        optimizer = api.get_full_optimizer_state_dict(w.model, w.optimizer, rank0_only=False) if both else {}
    else:
        model = states.get_model_state_dict(w.model, options=options)
        optimizer = states.get_optimizer_state_dict(w.model, w.optimizer, options=options) if both else {}
    model = {name: value.clone() for name, value in model.items()}
    w.note_all("saved", dict(sorted(model.items())))
    w.spoil()
    if ours:
        api.set_full_state_dict(w.model, model, rank0_only=False)
        if both:
            api.set_full_optimizer_state_dict(w.model, w.optimizer, optimizer, rank0_only=False)
    else:
        states.set_model_state_dict(w.model, model, options=options)
        if both:
            states.set_optimizer_state_dict(w.model, w.optimizer, optimizer, options=options)


@action(weight=2, draw=lambda rng: (rng.choice(("torch.save", "torch.save", "sharded", "on CPU")),))
def optimizer_states(w: World, how: str) -> None:
    """State dicts of model and optimizer, out and into other weights and a new optimizer: plain ones, or torch's."""
    w.rest()
    w.optimizer.zero_grad()
    options = states.StateDictOptions(cpu_offload=how == "on CPU", strict=False)
    if how == "torch.save":
        model, optimizer = w.model.state_dict(), w.optimizer.state_dict()
    else:
        model, optimizer = states.get_state_dict(w.model, w.optimizer, options=options)
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    model, optimizer = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    w.spoil()
    w.optimizer = of_groups(w.optimizer, w.params)
    if how == "torch.save":
        w.model.load_state_dict(model)
        w.optimizer.load_state_dict(optimizer)
    else:
        states.set_state_dict(
            w.model, w.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=options
        )


def save(w: World, folder: Path, **how: Any) -> None:
    """Save model and optimizer with DCP, which takes a buffer from any rank."""
    model, optimizer = states.get_state_dict(w.model, w.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder, **how)


def load(w: World, folder: Path, **how: Any) -> None:
    """Load model and optimizer with DCP."""
    model, optimizer = states.get_state_dict(w.model, w.optimizer)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)  # some parameters have no state yet
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder, planner=planner, **how)
    options = states.StateDictOptions(strict=False)
    states.set_state_dict(
        w.model, w.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=options
    )


@action(weight=0.7)
def checkpoint(w: World) -> None:
    """DCP, out and into the same model after its weights have changed."""
    w.rest()
    w.optimizer.zero_grad()
    w.same_buffers()
    with w.folder() as common:
        folder = common if w.units else common / str(dist.get_rank())
        save(w, folder, no_dist=not w.units)
        w.spoil()
        load(w, folder, no_dist=not w.units)


@action(draw=lambda rng: (rng.choice(("plain", "plain", "part", "mesh")),))
def checkpoint_elsewhere(w: World, where: str) -> None:
    """DCP into a model on other ranks or of plain modules, which is changed and saved; then back."""
    w.rest()
    w.optimizer.zero_grad()
    other, group = w.elsewhere(where)
    alone: dict[str, Any] = {"no_dist": True} if group is None else {"process_group": group}
    first = not w.units or dist.get_rank() < (1 if group is None else dist.get_world_size(group))
    w.same_buffers()
    with w.folder() as common:
        folder = common if w.units else common / str(dist.get_rank())
        save(w, folder / "out", no_dist=not w.units)
        load(other, folder / "out", **alone)
        other.rest()
        w.note_all("elsewhere", other.params)
        for name, param in other.params.items():
            for key, value in other.optimizer.state.get(param, {}).items():
                if not isinstance(value, torch.Tensor) or value.shape != param.shape:
                    continue
                if value.is_floating_point() or not w.program.precision:  # else codes of other values
                    w.note(f"elsewhere {key} {name}", value)
        with torch.no_grad():
            for _, param in other.named():
                param.mul_(0.9)
        if first:
            save(other, folder / "back", **alone)
        dist.barrier()
        load(w, folder / "back", no_dist=not w.units)


@action(weight=0.5, fsdp2=False, draw=coin)
def files(w: World, assign: bool = False) -> None:
    """Out to safetensors and in again, after weights were changed in place or assigned."""
    w.rest()
    w.same_buffers()  # files have the first rank's
    if assign:
        w.optimizer.zero_grad()  # parameters that are assigned come without gradients
    if w.units:
        with w.folder() as folder:
            w.system.api.save_safetensors(w.model, folder)
            if assign:
                values = w.model.state_dict().items()
                w.model.load_state_dict({name: value.clone() for name, value in values}, assign=True)
            with torch.no_grad():
                for param in w.model.parameters() if assign else w.params.values():
                    if param.requires_grad or w.program.quantized != "nf4":
                        param.mul_(0.0)
            if "subclass" in w.program.layers:  # as the refusal says
                read = importlib.import_module("fsdp_runtime.checkpoint").read_safetensors
                w.model.load_state_dict(read(folder), strict=False)  # of tied weights there is one
            else:
                w.system.api.load_safetensors(w.model, folder)
    if assign:
        w.params = dict(w.model.named_parameters())
        w.optimizer = w.make_optimizer(w.named())


# -- optimizers ------------------------------------------------------------------------------------------------------


@action(draw=lambda rng: (rng.choice((0.5, 2.0)),))
def learning_rate(w: World, factor: float) -> None:
    for group in w.optimizer.param_groups:
        group["lr"] *= factor


@action(weight=0.5)
def schedule(w: World) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(w.optimizer, 1, gamma=0.5)
    w.optimizer.zero_grad()
    w.loss().backward()
    step(w)
    scheduler.step()


@action(draw=coin)
def new_optimizer(w: World, keeps: bool) -> None:
    """A new optimizer, with the states of the old one or without."""
    w.rest()
    old = w.optimizer.state_dict()
    w.optimizer = of_groups(w.optimizer, dict(w.named())) if keeps else w.make_optimizer(w.named())
    if keeps:
        w.optimizer.load_state_dict(old)


@action(weight=0.5)
def add_param_group(w: World) -> None:
    """A new optimizer of one half, to which the other half is added."""
    w.rest()
    named = w.named()
    w.optimizer = w.make_optimizer(named[::2])
    if len(w.optimizer.param_groups) == 1 and "algorithm" not in w.optimizer.param_groups[0]:
        w.optimizer.add_param_group({"params": named[1::2], "lr": 0.02})


@action(weight=0.5)
def move_to_another_group(w: World) -> None:
    """Up to three parameters of the first group go, a step apart, to one of another rate.

    One process makes its optimizer anew each time: it would have a fault in how groups are followed, too.
    """
    w.rest()
    for moved in range(min(3, len(w.optimizer.param_groups[0]["params"]) - 1)):
        if moved == 0:
            _one_more_step(w)
        first, last = w.optimizer.param_groups[0], w.optimizer.param_groups[-1]
        name, param = first["param_names"].pop(), first["params"].pop()
        if moved == 0:
            own = {key: value for key, value in first.items() if key != "param_names"}
            w.optimizer.add_param_group({**own, "params": [(name, param)], "lr": 4 * first["lr"]})
        else:
            last["param_names"].insert(0, name)
            last["params"].insert(0, param)
        if w.system.name == "alone":
            w.optimizer = made_anew(w.optimizer)
        _one_more_step(w)


def _one_more_step(w: World) -> None:
    w.optimizer.zero_grad()
    w.loss().backward()
    step(w)


def made_anew(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same groups and states."""
    groups = optimizer.param_groups
    named = [pair for group in groups for pair in zip(group["param_names"], group["params"], strict=True)]
    other = of_groups(optimizer, dict(named))
    other.load_state_dict(optimizer.state_dict())
    return other


def of_groups(optimizer: torch.optim.Optimizer, params: dict[str, Any]) -> torch.optim.Optimizer:
    """An optimizer without states, of the same groups of these parameters."""
    groups = [dict(group) for group in optimizer.param_groups]
    for group in groups:
        group["params"] = [(name, params[name]) for name in group.pop("param_names")]
    kind: Callable[[Any], torch.optim.Optimizer] = type(optimizer)
    return kind(groups)


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
    w.optimizer.zero_grad()  # they would be lost too
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
