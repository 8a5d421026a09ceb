"""A checkpoint goes from one layout to the next, through DCP: dp2 x tp2 -> pp2 x dp2 -> ep2 -> plain -> dp4.

In each layout the model and its optimizer load what the layout before has saved, are compared with a plain twin bit for
bit, and make a step from the twin's gradients: so what is loaded is also what the run goes on with.
"""

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases_ep import meshes, transformer, wrap_blocks
from harness import Outcome, case, full
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from block_optim import SOAP, Shampoo, mixed_optimizer_for
from ragged_shard import distribute_like
from ragged_shard.testing import rank_mesh

SECTION = "Checkpoints from dp2 x tp2 to pp2 x dp2 to ep2 x dp2 to plain to dp4, model and optimizer"
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
Make = Callable[[Any], torch.optim.Optimizer]
build = transformer(4)


def tensor_parallel(fsdp: Any) -> nn.Module:
    """dp 2 x tp 2; also of the experts, whose rows and columns are cut."""
    mesh = rank_mesh(2, 2, names=("dp", "tp"))
    model: Any = build()
    column, row = ColwiseParallel(), RowwiseParallel()
    for block in model.blocks:
        attention = {"attention.wq": column, "attention.wv": column, "attention.wo": row}
        parallelize_module(block, mesh["tp"], attention)
        for name, dim in (("w_gate", 1), ("w_up", 1), ("w_down", 2)):
            cut = distribute_tensor(getattr(block.ff, name).detach(), mesh["tp"], [Shard(dim)])
            setattr(block.ff, name, nn.Parameter(cut))
    parallelize_module(model, mesh["tp"], {"embed": row, "head": column})
    for block in model.blocks:
        fsdp.fully_shard(block, mesh=mesh["dp"])
    return fsdp.fully_shard(model, mesh=mesh["dp"])


def pipeline(fsdp: Any) -> nn.Module:
    """pp 2 x dp 2: a rank has one of the two blocks, under its old name."""
    mesh = rank_mesh(2, 2, names=("pp", "dp"))
    model: Any = build()
    stage = mesh.get_local_rank("pp")
    model.blocks = nn.ModuleDict({str(stage): model.blocks[stage]})
    for name in ("norm", "head") if stage == 0 else ("embed",):
        delattr(model, name)
    fsdp.fully_shard(model.blocks[str(stage)], mesh=mesh["dp"])
    return fsdp.fully_shard(model, mesh=mesh["dp"])


def expert_parallel(fsdp: Any) -> nn.Module:
    """ep 2: experts on a mesh of their own, everything else on all four ranks."""
    model = build()
    wrap_blocks(fsdp, model, meshes(2))
    return model


def plain(fsdp: Any) -> nn.Module:
    return build()


def data_parallel(fsdp: Any) -> nn.Module:
    mesh = rank_mesh(4)
    model: Any = build()
    for block in model.blocks:
        fsdp.fully_shard(block, mesh=mesh)
    return fsdp.fully_shard(model, mesh=mesh)


LAYOUTS = (tensor_parallel, pipeline, expert_parallel, plain, data_parallel)


def like(param: Any, value: torch.Tensor) -> torch.Tensor:
    """A full tensor, distributed as a parameter is."""
    return distribute_like(value.clone(), param, src_data_rank=None)


def step(models: list[nn.Module], optimizers: list[torch.optim.Optimizer], number: int) -> None:
    """The same gradients for both, but for parameters that one of them has not got."""
    twin = dict(models[-1].named_parameters())
    generator = torch.Generator().manual_seed(number)
    grads = {name: torch.randn(param.shape, generator=generator) for name, param in twin.items()}
    for model, optimizer in zip(models, optimizers, strict=True):
        for name, param in model.named_parameters():
            param.grad = like(param, grads[name])
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    values, states = get_state_dict(model, optimizer, options=OPTIONS)
    return {"model": values, "optimizer": states}


def differing(found: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    """The names of tensors that are not the twin's, bit for bit."""
    for kind, values in found.items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and not torch.equal(full(value), full(wanted[kind][name])):
                yield name


def run(fsdp: Any, make: Make) -> Outcome:
    """`gradients` is the number of tensors that differ anywhere on the way."""
    folders: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    twin = build()
    theirs = make(twin)
    wrong: list[str] = []
    for number, layout in enumerate(LAYOUTS):
        model = layout(fsdp)
        ours = make(model)
        if number:
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()  # nothing of the twin's is there before loading
            state = state_of(model, ours)
            dcp.load(state, checkpoint_id=f"{folders[0]}/{number - 1}")
            set_state_dict(
                model, ours, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=OPTIONS,
            )  # fmt: skip
            wrong += differing(state_of(model, ours), state_of(twin, theirs))
        step([model, twin], [ours, theirs], number)
        state = state_of(model, ours)
        wrong += differing(state, state_of(twin, theirs))
        dcp.save(state, checkpoint_id=f"{folders[0]}/{number}")
    assert not wrong, f"differ: {sorted(set(wrong))[:5]} and {len(wrong)} in all"
    return Outcome(0.0, 0.0)


@case(SECTION, "torch's AdamW", bound=0.0)
def checkpoint_adamw(fsdp: Any) -> Outcome:
    return run(fsdp, lambda model: torch.optim.AdamW(model.parameters(), lr=0.1))


NOT_FSDP2 = "block-optim's `test_fsdp2.py`"
# A pipeline's stage would number its blocks by itself, and so refresh them at other turns.
TURNS: dict[str, Any] = {"max_preconditioner_dim": 8, "precondition_frequency": 2}


@case(SECTION, "Muon and AdamW by `mixed_optimizer_for`", bound=0.0, only_ours=NOT_FSDP2)
def checkpoint_mixed(fsdp: Any) -> Outcome:
    return run(fsdp, lambda model: mixed_optimizer_for(model, lr=0.1, verbose=False))


@case(SECTION, "Shampoo", bound=0.0, only_ours=NOT_FSDP2)
def checkpoint_shampoo(fsdp: Any) -> Outcome:
    return run(fsdp, lambda model: Shampoo(model.named_parameters(), **TURNS))


@case(SECTION, "SOAP", bound=0.0, only_ours=NOT_FSDP2)
def checkpoint_soap(fsdp: Any) -> Outcome:
    return run(fsdp, lambda model: SOAP(model.named_parameters(), **TURNS))
