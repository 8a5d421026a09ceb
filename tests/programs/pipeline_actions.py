"""An action: out to two stages of a pipeline by a checkpoint, a step there, and back."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import pipelining
from torch.distributed.checkpoint import state_dict as states

from ragged_shard.testing import rank_mesh

from .layers import LAYERS
from .models import loss_of
from .world import World, action, coin, of_groups

FLAT = states.StateDictOptions(flatten_optimizer_state_dict=True, strict=False)
APART = {
    "batch norm",
    "dropout",
    "compiled",
}  # layers that make another thing of another division of the batch


class Stage(nn.Module):
    """A part of a model, whose parameters have the model's names."""

    autocast = False

    def __init__(self, kinds: tuple[str, ...], width: int, last: bool, model: Any):
        super().__init__()
        half = len(kinds) // 2
        numbers = range(half, len(kinds)) if last else range(half)
        self.layers = nn.ModuleDict({str(number): LAYERS[kinds[number]](width) for number in numbers})
        self.chosen: list[int] = []
        if last:
            self.norm, self.head = (
                type(model.norm)(width),
                nn.Linear(width, len(model.head.weight), bias=False),
            )
        else:
            self.embed = nn.Embedding(len(model.embed.weight), width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) if hasattr(self, "embed") else x
        for layer in self.layers.values():
            x = layer.after(layer.run(x, self.chosen), x, False)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def staged(w: World, last: bool, reshard: bool) -> World:
    """This rank's stage, sharded over the ranks that have it, with an optimizer of the same groups."""
    stage = Stage(w.program.layers, w.program.width, last, w.model)
    there = dict(stage.named_modules())
    units = [
        dataclasses.replace(unit, modules=modules, reshard=reshard)
        for unit in w.program.units
        if (modules := tuple(path for path in unit.modules if path in there))
    ]
    program = dataclasses.replace(w.program, mesh="pp", units=tuple(units))
    for name, param in stage.named_parameters():
        param.requires_grad_(w.params[name].requires_grad)
    world = World(program, w.system, stage, lambda named: of_groups(w.optimizer, dict(named)))
    world.build()
    return world


def with_state(w: World) -> set[str]:
    """The names of the parameters that the optimizer has a state of, on any rank."""
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, {name for name, param in w.params.items() if w.optimizer.state.get(param)})
    return set().union(*names)


def save(w: World, folder: Path) -> None:
    """Save model and optimizer, each option of the optimizer under the name of a parameter."""
    model, optimizer = states.get_state_dict(w.model, w.optimizer, options=FLAT)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)


def load(w: World, folder: Path, names: set[str]) -> None:
    """Load model and optimizer into a new optimizer, which has states of the parameters of these names."""
    w.optimizer = of_groups(w.optimizer, w.params)
    model, optimizer = states.get_state_dict(w.model, w.optimizer, options=FLAT)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder, planner=planner)
    states.set_state_dict(
        w.model, w.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=FLAT
    )
    for name, param in w.params.items():
        if name not in names:
            w.optimizer.state.pop(param, None)


def run(w: World, other: World, schedule: str, microbatches: int) -> torch.Tensor:
    """A step's gradients, of the batches of all ranks; returns the mean of their losses."""
    mesh = rank_mesh(2, dist.get_world_size() // 2, names=("pp", "pdp"))
    group, last = mesh.get_group("pp"), mesh.get_local_rank("pp") == 1
    tokens, targets, other.model.chosen = w.batch()
    rows = [tokens.new_empty(2 * len(tokens), *tokens.shape[1:]) for _ in range(2)]
    for out, own in zip(rows, (tokens, targets), strict=True):
        dist.all_gather_into_tensor(out, own, group=group)
    piped = pipelining.PipelineStage(other.model, int(last), 2, torch.device("cpu"), group=group)
    kind = getattr(pipelining, f"Schedule{schedule}")(piped, microbatches, loss_fn=loss_of)
    losses: list[torch.Tensor] = []
    if last:
        kind.step(target=rows[1], losses=losses)
    else:
        kind.step(rows[0])
    mean = torch.stack(losses).mean().detach() if last else torch.zeros((), dtype=torch.float64)
    dist.all_reduce(mean)
    return mean / mesh.size(1)


@action(draw=lambda rng: (rng.choice(("GPipe", "1F1B")), rng.choice((2, 4)), *coin(rng)))
def pipeline(w: World, schedule: str, microbatches: int, reshard: bool) -> None:
    """Two stages load the model and the optimizer, make a step, and save them for the model to load."""
    program, ranks = w.program, dist.get_world_size()
    whole = program.ends == "" and not any(program.is_plain(name) for name in w.params)
    odd = program.uneven or program.quantized or program.precision or {*program.layers} & APART
    if ranks % 2 or odd or not whole:
        return
    w.rest()
    w.optimizer.zero_grad()
    w.clear_gradients()
    if not w.units:
        loss = w.loss()
        loss.backward()
        w.system.average(w.params)
        dist.all_reduce(mean := loss.detach().clone())
        w.note("loss", mean / ranks)
        w.note_all("grad of", {name: param.grad for name, param in w.params.items()})
        w.round_gradients()
        w.optimizer.step()
        w.optimizer.zero_grad()
        return
    other = staged(w, dist.get_rank() >= ranks // 2, reshard)
    with w.folder() as folder:
        names = with_state(w)
        save(w, folder / "out")
        load(other, folder / "out", names)
        w.note("loss", run(w, other, schedule, microbatches))
        parts: list[Any] = [None] * ranks
        own = {name: param.grad for name, param in other.params.items() if param.grad is not None}
        dist.all_gather_object(parts, {name: other.full(grad).detach() for name, grad in own.items()})
        grads = {name: grad for part in parts for name, grad in part.items()}
        w.note_all("grad of", {name: grads.get(name) for name in w.params})
        other.round_gradients()
        other.optimizer.step()
        other.optimizer.zero_grad()
        other.rest()
        save(other, folder / "back")
        w.spoil()
        load(w, folder / "back", with_state(other))
