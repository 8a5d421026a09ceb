"""Pipelines of sharded stages. Every schedule, with parameters freed after forward or not: `test_pipelining.py`."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from harness import Outcome, average, case, counts, full, of_values, record_collectives
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
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def stages(number: int) -> list[nn.Sequential]:
    """All stages of the model, the same on every rank: two layers each."""
    torch.manual_seed(0)
    return [nn.Sequential(Layer(), Layer()) for _ in range(number)]


def mean_square(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (found - target).square().mean()


def batch(step: int) -> torch.Tensor:
    return torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def indices_of(schedule: str, rank: int) -> list[int]:
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


def built_stages(
    fsdp, name, mesh, reshard=False, tp=False
) -> tuple[list[nn.Sequential], list[int], list[Any]]:
    """All modules of a schedule's stages, the indices of this rank's, which are sharded, and their stages."""
    everything = stages(4 if name in LOOPED + V_SHAPED else 2)
    mine = indices_of(name, mesh.get_local_rank("pp"))
    for index in mine:
        shard(fsdp, everything[index], mesh, reshard, tp)
    group, device = mesh["pp"].get_group(), torch.device("cpu")
    built = [PipelineStage(everything[i], i, len(everything), device, group=group) for i in mine]
    return everything, mine, built


def run(fsdp, name, *, microbatches=4, reshard=False, tp=False, shared=False) -> Outcome:
    """Train over a mesh of two stages' ranks and two of FSDP, or of TP; the twin in one process."""
    mesh = rank_mesh(*((2, 1, 2) if tp else (2, 2, 1)), names=("pp", "dp", "tp"))
    everything, mine, built = built_stages(fsdp, name, mesh, reshard, tp)
    number, modules = len(everything), [everything[index] for index in mine]
    twin = nn.Sequential(*stages(number))
    if shared:
        fsdp.share_comm_ctx(modules)
    kind: Any = getattr(pipelining, name)
    schedule = kind(built if number == 4 else built[0], microbatches, loss_fn=mean_square)
    ours = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    outcome = Outcome(0.0, 0.0)
    share = 1 if tp else 2
    for step in range(2):
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
                assert other.grad is not None
                if param.grad is None:  # FSDP2 loses some where a schedule computes them apart
                    gradients = float("inf")
                    continue
                away = (full(param.grad) - other.grad).abs().max() / other.grad.abs().max()
                gradients = max(gradients, away.item())
        moved = {one: count for one, count in Counter(of_values(record)).items() if one in MOVED}
        outcome = replace(
            outcome, loss=max(outcome.loss, distance), gradients=max(outcome.gradients, gradients), counts=moved,
            bytes_sent=record.bytes_sent,
        )  # fmt: skip
        for optimizer in (ours, plain):
            optimizer.step()
            optimizer.zero_grad()
    return outcome


# Two layers in each of one or two stages, and a stage whose own unit has no parameters: a gather and a reduction each,
# whatever the number of microbatches.


def enter(name: str, text: str, schedule: str, expected: Mapping[str, int], **options: Any) -> None:
    """A case of a schedule; FSDP2 cannot share a context among the stages of a rank."""
    since = (2, 12) if f"Schedule{schedule}" in V_SHAPED else (2, 11)
    why = HANGS if options.get("shared") else ""

    @case(PP, text, counts=expected, name=name, only_ours=why, since=since)
    def entered(fsdp: Any) -> Outcome:
        return run(fsdp, f"Schedule{schedule}", **options)


ONE = "one context for both stages of a rank"
enter("1f1b", "1F1B, 4 microbatches", "1F1B", counts(2, 2))
enter("more_microbatches", "1F1B, 8 microbatches", "1F1B", counts(2, 2), microbatches=8)
for _number in (4, 8):
    enter(
        f"interleaved_shared_{_number}", f"Interleaved1F1B, {_number} microbatches, {ONE}", "Interleaved1F1B",
        counts(4, 4), microbatches=_number, shared=True,
    )  # fmt: skip
for _name in ("InterleavedZeroBubble", "ZBVZeroBubble"):
    enter(f"{_name}_shared", f"{_name}, {ONE}", _name, counts(4, 4), shared=True)
enter(
    "freed_shared", f"LoopedBFS, parameters freed after forward, {ONE}", "LoopedBFS", counts(20, 4), reshard=True,
    shared=True,
)  # fmt: skip
for _name, _count in (("GPipe", 12), ("Interleaved1F1B", 28), ("InterleavedZeroBubble", 28)):
    enter(f"{_name}_tp", f"{_name} x tp 2", _name, counts(all_reduce=_count), tp=True)
