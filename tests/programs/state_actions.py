"""Actions: checkpoints and optimizers."""

import importlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as states

from .actions import one_more_step, step
from .world import World, action, coin, made_anew, of_groups

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
        # a plain model has no entry for codes, which a partial load leaves out
        w.note_all(
            "elsewhere", {n: p for n, p in other.params.items() if where != "plain" or not w.is_codes(n)}
        )
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
    with w.folder() as folder:
        if w.units:
            w.system.api.save_safetensors(w.model, folder)
        if assign:
            values = w.model.state_dict().items()
            w.model.load_state_dict({name: value.clone() for name, value in values}, assign=True)
            w.model.tie()
        if w.units:
            _lose_and_load(w, folder, dict(w.model.named_parameters()) if assign else w.params)
    if assign:
        w.params = dict(w.model.named_parameters())
        w.optimizer = w.make_optimizer(w.named())


@torch.no_grad()
def _lose_and_load(w: World, folder: Path, params: Mapping[str, torch.Tensor]) -> None:
    """Lose weights, then load files."""
    for name, param in params.items():
        if not w.is_fixed(name):
            param.mul_(0.0)
    if "subclass" in w.program.layers:  # as the refusal says
        read = importlib.import_module("fsdp_runtime.checkpoint").read_safetensors
        w.model.load_state_dict(read(folder), strict=False)  # of tied weights there is one
    else:
        w.system.api.load_safetensors(w.model, folder)


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
            one_more_step(w)
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
        one_more_step(w)
