"""Optimizers of torch with their options, schedules, clipping by value, and parameters that a user sets by hand."""

import contextlib
import dataclasses
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import lr_scheduler

import block_optim
from layout_planner import Elements, Tile

from .actions import one_more_step, step
from .layers import LENGTH, ROWS
from .models import loss_of
from .state_actions import load, save
from .world import World, action, layer

Named = list[tuple[str, nn.Parameter]]
# A large `eps` where an optimizer divides by the root of a square, so that rounding of tiny gradients turns no step.
TORCH: dict[str, Callable[[Named], optim.Optimizer]] = {
    "sgd foreach": lambda named: optim.SGD(named, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "sgd fused": lambda named: optim.SGD(named, lr=0.05, fused=True),
    "adamw foreach": lambda named: optim.AdamW(named, lr=0.01, eps=1e-3, foreach=True),
    "adamw single": lambda named: optim.AdamW(named, lr=0.01, eps=1e-3, foreach=False),
    "adamw fused": lambda named: optim.AdamW(named, lr=0.01, eps=1e-3, fused=True),
    "adamw tensor rate": lambda named: optim.AdamW(named, lr=torch.tensor(0.01), eps=1e-3, foreach=False),
    "amsgrad": lambda named: optim.Adam(named, lr=0.01, eps=1e-3, amsgrad=True, weight_decay=0.1),
    "adagrad": lambda named: optim.Adagrad(named, lr=0.02, eps=1e-3, initial_accumulator_value=0.1),
    "rmsprop": lambda named: optim.RMSprop(named, lr=0.01, eps=1e-2, momentum=0.9, centered=True),
    "nadam": lambda named: optim.NAdam(named, lr=0.01, eps=1e-3),
    "radam": lambda named: optim.RAdam(named, lr=0.01, eps=1e-3),
    "adamax": lambda named: optim.Adamax(named, lr=0.01, eps=1e-2),
    "asgd": lambda named: optim.ASGD(named, lr=0.05, t0=1.0),
    "adadelta": lambda named: optim.Adadelta(named, lr=0.5, eps=1e-3),
}
RANDOM = ("uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "kaiming_normal_", "orthogonal_")

# -- steps -----------------------------------------------------------------------------------------------------------


def _scheduler(kind: str, optimizer: Any) -> Any:
    """A schedule; one that cycles momentum does so where the optimizer has momentum."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    if kind == "one cycle":
        cycles = all("momentum" in group or "betas" in group for group in optimizer.param_groups)
        return lr_scheduler.OneCycleLR(
            optimizer, [2 * rate for rate in rates], total_steps=8, cycle_momentum=cycles
        )
    if kind == "plateau":
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    warm = lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if kind == "lambda":
        return warm
    if kind == "restarts":
        return lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 3)
    if kind == "sequential":
        return lr_scheduler.SequentialLR(optimizer, [warm, cosine], [1])
    return lr_scheduler.ChainedScheduler([warm, cosine]) if kind == "chained" else cosine


SCHEDULES = ("one cycle", "plateau", "lambda", "restarts", "cosine", "sequential", "chained")


@action(weight=1.8, draw=lambda rng: (rng.choice(SCHEDULES),))
def schedules(w: World, kind: str) -> None:
    """Three steps with a schedule, whose state goes through a state dict after the second."""
    w.kept.clear()
    scheduler = _scheduler(kind, w.optimizer)
    for number in range(3):
        one_more_step(w)
        scheduler.step(*([1.0] if kind == "plateau" else []))
        if number == 1:
            scheduler.load_state_dict(scheduler.state_dict())
    for group in w.optimizer.param_groups:
        w.note("rate", float(group["lr"]))


@action(weight=0.5)
def closure(w: World) -> None:
    """A step whose closure computes the gradients."""
    w.kept.clear()

    def compute() -> torch.Tensor:
        w.optimizer.zero_grad()
        loss = w.loss()
        loss.backward()
        w.system.average(w.params)
        w.round_gradients()
        return loss

    w.note("loss", w.optimizer.step(compute))
    w.optimizer.zero_grad()


# -- gradients -------------------------------------------------------------------------------------------------------


@action(weight=0.5, draw=lambda rng: (rng.choice((0.001, 0.05)),))
def clip_value(w: World, limit: float) -> None:
    if w.has_gradients():  # torch's function needs one
        w.system.average(w.params)
        nn.utils.clip_grad_value_(list(w.params.values()), limit)


@action(weight=0.5, draw=lambda rng: (rng.choice((0.01, 0.5)), rng.choice((2.0, 1.0, float("inf")))))
def clip_by_norm(w: World, limit: float, kind: float) -> None:
    """torch's two halves of clipping."""
    w.system.average(w.params)
    trained = [param for param in w.params.values() if param.grad is not None and param.numel()]
    if trained:
        norm = nn.utils.get_total_norm([param.grad for param in trained if param.grad is not None], kind)
        nn.utils.clip_grads_with_norm_(trained, limit, norm)
        w.note("norm", norm)


@action(weight=0.8, draw=lambda rng: (rng.choice(("data", "replace", "detach", "none")), *layer(rng)))
def gradients_by_hand(w: World, how: str, first: int) -> None:
    """Every third gradient is changed through `.data`, replaced, or dropped."""
    w.system.average(w.params)
    for param in [*w.params.values()][first::3]:
        if param.grad is None or how == "none":
            param.grad = None
        elif how == "data":
            param.grad.data.mul_(0.5)
        else:
            param.grad = param.grad * 0.5 if how == "replace" else param.grad.detach().clone()


# -- weights ---------------------------------------------------------------------------------------------------------


@action(weight=0.8, draw=lambda rng: (rng.choice(("product", "clone", "zeros", "other")), *layer(rng)))
def assign_data(w: World, how: str, first: int) -> None:
    """`param.data =` of every third parameter."""
    w.rest()
    params = [param for _, param in w.named() if param.numel()][first::3]
    for param in params:
        if how == "other":  # of the same storage
            param.data = param.detach()
            param.data.mul_(0.9)
        else:
            made = {"product": lambda p: p.data * 0.9, "clone": lambda p: p.data.clone()}
            param.data = made.get(how, lambda p: torch.zeros_like(p.data))(param)


@action(
    weight=0.8, draw=lambda rng: (rng.choice(("constant_", "zeros_", "ones_", "eye_", *RANDOM)), *layer(rng))
)
def initialize(w: World, how: str, first: int, whole: bool = False) -> None:
    """Functions of `nn.init` on every third parameter; after random ones, which have no twin, weights are loaded.

    With `whole` on whole parameters, inside of `full_params`.
    """
    w.rest()
    saved = {name: value.detach().clone() for name, value in w.model.state_dict().items()}
    flat = how in ("constant_", "zeros_", "ones_", "uniform_", "normal_", "trunc_normal_")
    names = [name for name, param in w.named() if param.numel() and (param.ndim == 2 or flat)]
    options: dict[str, Any] = {"constant_": {"val": 0.05}}.get(how, {})
    inside = w.system.api.full_params(w.model) if whole and w.units else contextlib.nullcontext()
    with inside:
        params = dict(w.model.named_parameters())
        for name in names[first::3]:
            getattr(nn.init, how)(params[name], **options)
    if how in RANDOM:
        w.model.load_state_dict(saved)


@action(weight=0.8, draw=lambda rng: (rng.choice(("embed", "head", 0, 1, 2)), rng.random() < 0.3))
def state_of_a_part(w: World, part: Any, through_file: bool) -> None:
    """The state dict of a submodule, scaled and loaded."""
    w.rest()
    module = w.layer(part) if isinstance(part, int) else getattr(w.model, part)
    found = module.state_dict()
    w.note_all("saved", {n: v for n, v in found.items() if w.program.quantized != "nf4"})
    scaled = {n: v * 0.9 if v.is_floating_point() else v.clone() for n, v in found.items()}
    if through_file:
        file = io.BytesIO()
        torch.save(scaled, file)
        scaled = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    module.load_state_dict(scaled)


# -- blocks ----------------------------------------------------------------------------------------------------------

BLOCKS: tuple[Any, ...] = ("auto", Tile(1, 4), Tile(4, 1), Tile(2, 2), Tile(2, 4), Elements(4), Elements(8))


def of_blocks(w: World, mesh: str, block: Any) -> World:
    """The model with an `AdamW8bit` of these blocks, which no unit cuts."""
    units = tuple(dataclasses.replace(unit, blocks="whole") for unit in w.program.units)
    world = w.of(dataclasses.replace(w.program, mesh=mesh, units=units))
    world.optimizer = block_optim.AdamW8bit(world.named(), lr=0.01, eps=1e-3, min_8bit_numel=16, block=block)
    return world


def same_step(w: World) -> None:
    """A step of the same batch on all ranks."""
    tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)
    torch.manual_seed(w.program.seed)
    loss_of(w.model(tokens), tokens).backward()
    step(w)


@action(
    weight=0,
    fsdp2=False,
    draw=lambda rng: (rng.choice(("same", "tp")), rng.randrange(len(BLOCKS)), rng.randrange(len(BLOCKS))),
)
def other_blocks(w: World, mesh: str, saved: int, loaded: int) -> None:
    """8-bit states of some blocks are loaded into others: right values, or a refusal that names a parameter."""
    fits = (
        "split" in w.program.layers and "subclass" not in w.program.layers and dist.get_world_size() % 2 == 0
    )
    mesh = "tp" if mesh == "tp" and fits and not w.program.is_plain("embed.weight") else w.program.mesh
    w.rest()
    w.clear_gradients()
    one = of_blocks(w, w.program.mesh, BLOCKS[saved])
    same_step(one)
    text = ""
    with w.folder() as common:
        folder = common if w.units else common / str(dist.get_rank())
        one.rest()
        save(one, folder, no_dist=not w.units)
        try:
            other = of_blocks(w, mesh, BLOCKS[loaded])
            load(other, folder, no_dist=not w.units)
        except (ValueError, CheckpointException) as error:
            text = str(error)
            if w.units and "tp" in (mesh, w.program.mesh):
                raise  # pieces have blocks of their own
        dist.barrier()
    w.note("refused", bool(text))
    if not text:
        same_step(other)
        other.rest()
        w.note_all("after", other.params)
    elif not any(name in text for name in w.params):
        raise AssertionError(f"a refusal that names no parameter: {text}")


OVERRIDES: dict[str, Any] = {"": {}, "adamw": {"layers.0": "adamw"}, "rate": {"head|embed": {"lr": 0.02}}}


@action(weight=0, draw=lambda rng: (rng.choice([*OVERRIDES]),))
def route(w: World, overrides: str) -> None:
    """block-optim chooses, by names and shapes, which algorithm trains a parameter."""
    w.rest()
    w.optimizer = block_optim.mixed_optimizer_for(
        w.model, lr=0.01, overrides=OVERRIDES[overrides], verbose=False
    )
