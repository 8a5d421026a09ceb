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

from .models import Model, loss_of
from .world import World, action, coin, of_groups

FLAT = states.StateDictOptions(flatten_optimizer_state_dict=True, strict=False)
# Layers that make another thing of another division of the batch.
APART = {"batch norm", "dropout", "spectral norm", "old spectral norm"}


class Numbered(nn.ModuleDict):
    """Some of a list's modules, under their numbers."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(str(key))


class Stage(Model):
    """A part of a model, whose parameters have the model's names."""

    def __init__(self, program: Any, last: bool):
        super().__init__(program.layers, program.width, program.ends, program.recompute)
        half = len(self.layers) // 2
        self.numbers = range(half, len(self.layers)) if last else range(half)
        layers: Any = Numbered({str(number): self.layers[number] for number in self.numbers})
        self.layers = layers
        self.chosen: list[int] = []
        for name in ("embed",) if last else ("norm", "head"):
            delattr(self, name)

    def forward(self, x):  # type: ignore[override]
        x = self.embed(x) if hasattr(self, "embed") else x
        for number in self.numbers:
            x = self.advance(number, x, self.chosen)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def staged(w: World, last: bool, reshard: bool) -> World:
    """This rank's stage, sharded over the ranks that have it, with an optimizer of the same groups."""
    stage = Stage(w.program, last)
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


def state_of(w: World) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a checkpoint has, and the optimizer's state dict; its options, of which each would be a file, stay out."""
    model, optimizer = states.get_state_dict(w.model, w.optimizer, options=FLAT)
    return {
        "model": model,
        "states": {k: v for k, v in optimizer.items() if k.startswith("state.")},
    }, optimizer


def load(w: World, folder: Path, names: set[str]) -> None:
    """Load model and optimizer into a new optimizer, which has states of the parameters of these names."""
    w.optimizer = of_groups(w.optimizer, w.params)
    found, optimizer = state_of(w)
    dcp.load(found, checkpoint_id=folder, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    states.set_state_dict(
        w.model,
        w.optimizer,
        model_state_dict=found["model"],
        optim_state_dict={**optimizer, **found["states"]},
        options=FLAT,
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


@action(weight=2, draw=lambda rng: (rng.choice(("GPipe", "1F1B")), rng.choice((2, 4)), *coin(rng)))
def pipeline(w: World, schedule: str, microbatches: int, reshard: bool) -> None:
    """Two stages load the model and the optimizer, make a step, and save them for the model to load."""
    program, ranks = w.program, dist.get_world_size()
    whole = program.ends == "" and not any(program.is_plain(name) for name in w.params)
    # torch's stages call backward for some tensors, which a reentrant checkpoint refuses. A stage numbers the blocks of
    # Shampoo and SOAP by itself, and refreshes them in other steps than the model.
    odd = program.recompute == "reentrant" or program.optimizer in ("shampoo", "soap")
    odd = odd or program.uneven or program.quantized or program.precision or {*program.layers} & APART
    if (
        ranks % 2
        or odd
        or not whole
        or program.rows
        or program.module_hooks
        or program.departs
        or program.compiled
    ):
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
        dcp.save(state_of(w)[0], checkpoint_id=folder / "out")
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
        dcp.save(state_of(other)[0], checkpoint_id=folder / "back")
        w.spoil()
        load(w, folder / "back", with_state(other))
