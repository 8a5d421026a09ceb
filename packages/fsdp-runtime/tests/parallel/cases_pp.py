"""Pipelines of sharded stages. Every schedule, with parameters freed after forward or not: `test_pipelining.py`."""

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from harness import Outcome, average, case, full, record_collectives
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ragged_shard.testing import rank_mesh

PP = "Pipelines"
WIDTH, ROWS = 8, 16
LOOPED = ("ScheduleLoopedBFS", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
HANGS = "with `share_comm_ctx` two ranks fail and the others wait"
MOVED = ("all_gather", "reduce_scatter", "all_reduce")  # sends between stages belong to the schedule


class Layer(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return found


def stages(number: int) -> list[nn.Sequential]:
    """All stages of the model, the same on every rank: two layers each."""
    torch.manual_seed(0)
    return [nn.Sequential(Layer(), Layer()) for _ in range(number)]


def mean_square(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss."""
    return (found - target).square().mean()


def batch(step: int) -> torch.Tensor:
    """Inputs and targets of a step, all of them."""
    return torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def indices_of(schedule: str, rank: int) -> list[int]:
    """Which of the stages one of two ranks has."""
    if schedule in V_SHAPED:
        return [rank, 3 - rank]
    return [rank, 2 + rank] if schedule in LOOPED else [rank]


def shard(fsdp: Any, stage: Any, mesh: DeviceMesh, reshard: bool, tp: bool) -> Any:
    """A unit for each layer and one for the stage."""
    for layer in stage:
        if tp:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fsdp.fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=reshard)
    return fsdp.fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=reshard)


def run(
    fsdp: Any,
    name: str,
    *,
    microbatches: int = 4,
    reshard: bool = False,
    tp: bool = False,
    shared: bool = False,
    steps: int = 2,
) -> Outcome:
    """Train over a mesh of two stages' ranks and two of FSDP, or of TP; the twin in one process."""
    shape = (2, 1, 2) if tp else (2, 2, 1)
    mesh = rank_mesh(*shape, names=("pp", "dp", "tp"))
    number = 4 if name in LOOPED + V_SHAPED else 2
    rank = mesh.get_local_rank("pp")
    everything, twin, mine = stages(number), nn.Sequential(*stages(number)), indices_of(name, rank)
    for index in mine:
        shard(fsdp, everything[index], mesh, reshard, tp)
    modules = [everything[index] for index in mine]
    if shared:
        fsdp.share_comm_ctx(modules)
    group = mesh["pp"].get_group()
    built: list[Any] = [
        PipelineStage(module, index, number, torch.device("cpu"), group=group)
        for index, module in zip(mine, modules, strict=True)
    ]
    kind: Any = getattr(pipelining, name)
    schedule = kind(built if number == 4 else built[0], microbatches, loss_fn=mean_square)
    ours = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    outcome = Outcome(0.0, 0.0)
    share = 1 if tp else 2
    for step in range(steps):
        x, target = batch(step)
        wanted = mean_square(twin(x), target)
        wanted.backward()
        mine_x, mine_target = (t.chunk(share)[mesh.get_local_rank("dp")] for t in (x, target))
        losses: list[torch.Tensor] = []
        with record_collectives() as record:
            first, last = 0 in mine, number - 1 in mine
            arguments = (mine_x,) if first else ()
            schedule.step(*arguments, **({"target": mine_target, "losses": losses} if last else {}))
        found = torch.stack(losses).mean() if losses else torch.zeros(())
        holders = 2  # of four ranks, those with the last stage
        distance = abs(average(found.detach()) * 4 / holders - wanted.item()) / wanted.item()
        gradients = 0.0
        for index in mine:
            for param, other in zip(everything[index].parameters(), twin[index].parameters(), strict=True):
                assert param.grad is not None
                assert other.grad is not None
                away = (full(param.grad) - other.grad).abs().max() / other.grad.abs().max()
                gradients = max(gradients, away.item())
        counts = {one: count for one, count in Counter(record.kinds).items() if one in MOVED}
        outcome = replace(
            outcome,
            loss=max(outcome.loss, distance),
            gradients=max(outcome.gradients, gradients),
            counts=counts,
            bytes_sent=record.bytes_sent,
        )
        for optimizer in (ours, plain):
            optimizer.step()
            optimizer.zero_grad()
    return outcome


# Two layers in each of one or two stages, and a stage whose own unit has no parameters: a gather and a reduction each,
# whatever the number of microbatches.


@case(PP, "1F1B, 4 microbatches", counts={"all_gather": 2, "reduce_scatter": 2})
def one_forward_one_backward(fsdp: Any) -> Outcome:
    return run(fsdp, "Schedule1F1B")


@case(PP, "1F1B, 8 microbatches", counts={"all_gather": 2, "reduce_scatter": 2})
def more_microbatches(fsdp: Any) -> Outcome:
    return run(fsdp, "Schedule1F1B", microbatches=8)


@case(
    PP,
    "Interleaved1F1B, 4 microbatches, one context for both stages of a rank",
    only_ours=HANGS,
    counts={"all_gather": 4, "reduce_scatter": 4},
)
def interleaved_shared(fsdp: Any) -> Outcome:
    return run(fsdp, "ScheduleInterleaved1F1B", shared=True)


@case(
    PP,
    "Interleaved1F1B, 8 microbatches, one context for both stages of a rank",
    only_ours=HANGS,
    counts={"all_gather": 4, "reduce_scatter": 4},
)
def interleaved_shared_more(fsdp: Any) -> Outcome:
    return run(fsdp, "ScheduleInterleaved1F1B", microbatches=8, shared=True)


@case(
    PP,
    "InterleavedZeroBubble, one context for both stages of a rank",
    only_ours=HANGS,
    counts={"all_gather": 4, "reduce_scatter": 4},
)
def zero_bubble_shared(fsdp: Any) -> Outcome:
    return run(fsdp, "ScheduleInterleavedZeroBubble", shared=True)


@case(
    PP,
    "ZBVZeroBubble, one context for both stages of a rank",
    only_ours=HANGS,
    since=(2, 12),
    counts={"all_gather": 4, "reduce_scatter": 4},
)
def zbv_shared(fsdp: Any) -> Outcome:
    return run(fsdp, "ScheduleZBVZeroBubble", shared=True)


@case(
    PP,
    "LoopedBFS, parameters freed after forward, one context for both stages of a rank",
    only_ours=HANGS,
    counts={"all_gather": 20, "reduce_scatter": 4},
)
def freed_shared(fsdp: Any) -> Outcome:
    return run(fsdp, "ScheduleLoopedBFS", reshard=True, shared=True)


@case(PP, "GPipe x tp 2", counts={"all_reduce": 12})
def gpipe_tp(fsdp: Any) -> Outcome:
    return run(fsdp, "ScheduleGPipe", tp=True)


@case(PP, "Interleaved1F1B x tp 2", counts={"all_reduce": 28})
def interleaved_tp(fsdp: Any) -> Outcome:
    return run(fsdp, "ScheduleInterleaved1F1B", tp=True)


@case(PP, "InterleavedZeroBubble x tp 2", counts={"all_reduce": 28})
def zero_bubble_tp(fsdp: Any) -> Outcome:
    return run(fsdp, "ScheduleInterleavedZeroBubble", tp=True)
