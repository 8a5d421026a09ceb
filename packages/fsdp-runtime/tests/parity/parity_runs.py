"""A run of a small transformer, by this runtime, by FSDP2 or in one process, and how far apart they end up."""

import functools
import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from parity_models import Shape, build, loss_of
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

STEPS, ROWS, LENGTH = 10, 24, 12  # 24 rows: whole numbers for 1, 2, 3 and 4 ranks with two microbatches
SYSTEMS = {"fsdp2": "torch.distributed.fsdp", "ours": "fsdp_runtime"}


@dataclass(frozen=True)
class Run:
    """What is trained and how. ``blocks`` names a block policy, which only this runtime takes."""

    shape: Shape = Shape()  # noqa: RUF009
    optimizer: str = "sgd"
    low: bool = False  # bf16 compute, fp32 reduce
    hsdp: bool = False
    microbatches: int = 1
    sync: bool = False  # reduce after each microbatch, not only after the last
    offload: bool = False
    recompute: str = ""  # "function" or "composable"
    reshard: bool | int | None = None
    blocks: str = ""
    device: str = "cpu"

    @property
    def twin(self) -> "Run":
        """FSDP2's run to compare with: without block policies, which it does not know, and what changes no value."""
        return replace(self, blocks="", offload=False, recompute="", reshard=None)

    @property
    def single(self) -> "Run":
        return Run(self.shape, self.optimizer, self.low, device=self.device)

    def __str__(self) -> str:
        parts = [self.optimizer, "bf16" if self.low else "fp32"]
        parts += ["HSDP"] * self.hsdp + ["offload"] * self.offload
        parts += [f"{self.microbatches} microbatches" + ", synced" * self.sync] * (self.microbatches > 1)
        parts += [f"checkpoint {self.recompute}"] * bool(self.recompute)
        parts += [f"reshard {self.reshard}"] * (self.reshard is not None) + [f"blocks {self.blocks}"] * bool(
            self.blocks
        )
        return ", ".join(parts)


@dataclass(frozen=True)
class Outcome:
    """Losses of the whole batch, one a step, and the parameters in the end."""

    losses: tuple[float, ...]
    parameters: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Report:
    """Distances: of losses, relative, the worst step; of parameters, to a tensor's largest value, the worst."""

    losses: float  # ours from one process
    parameters: float
    fsdp2_losses: float  # FSDP2 from one process
    fsdp2_parameters: float
    between_losses: float  # ours from FSDP2
    between_parameters: float
    same_bits: bool  # ours and FSDP2, losses and parameters


def policy_of(name: str) -> Any:
    """The block policies by the names that the tests use."""
    from fsdp_runtime import block_policies
    from layout_planner import Rows, Tile, Whole

    return {
        "rows": lambda name, p: Rows(8),
        "tiles": lambda name, p: Tile(8, 8) if p.ndim > 1 else None,
        "whole": block_policies.whole(),
        "pattern": block_policies.by_pattern({r"^ff\.": Whole(), r"^attention\.": Rows(4), r".": None}),
    }[name]


def tokens(step: int, shape: Shape) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(shape.vocab_size, (ROWS, LENGTH), generator=generator)


def optimizer_of(run: Run, parameters: Any) -> torch.optim.Optimizer:
    if run.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def wrap(fsdp: Any, model: Any, run: Run) -> None:
    ranks = dist.get_world_size()
    mesh = (
        init_device_mesh(run.device, (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
        if run.hsdp
        else init_device_mesh(run.device, (ranks,))
    )
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": run.reshard}
    if run.low:
        options["mp_policy"] = fsdp.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    if run.offload:
        options["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=run.device == "cuda")
    if run.blocks:
        options["block_policy"] = policy_of(run.blocks)
    for block in model.blocks:
        if run.recompute == "composable":
            composable_checkpoint(block)
        fsdp.fully_shard(block, **options)
    fsdp.fully_shard(model, **options)
    model.checkpointing = run.recompute == "function"


def sharded(system: str, run: Run) -> Outcome:
    fsdp = importlib.import_module(SYSTEMS[system])
    model: Any = build(run.shape)
    wrap(fsdp, model, run)
    optimizer = optimizer_of(run, model.parameters())
    losses = []
    for step in range(STEPS):
        rows = tokens(step, run.shape).chunk(dist.get_world_size())[dist.get_rank()].to(run.device)
        total = torch.zeros((), dtype=torch.float64, device=run.device)
        for i, part in enumerate(rows.chunk(run.microbatches)):
            model.set_requires_gradient_sync(run.sync or i == run.microbatches - 1)
            loss = loss_of(model(part), part) / run.microbatches
            loss.backward()
            total += loss.detach().double()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return Outcome(
        tuple(losses), {name: p.full_tensor().detach().cpu() for name, p in model.named_parameters()}
    )


@functools.lru_cache(maxsize=64)
def alone(run: Run) -> Outcome:
    """Train on the whole batch, in this process. For low precision: fp32 parameters, computed with as bf16."""
    model = build(run.shape).to(run.device)
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
    optimizer = optimizer_of(run, model.parameters())
    losses = []
    for step in range(STEPS):
        whole = tokens(step, run.shape).to(run.device)
        used = {name: p.to(torch.bfloat16) for name, p in parameters.items()} if run.low else parameters
        loss = loss_of(functional_call(model, used, (whole,)), whole)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return Outcome(tuple(losses), {name: p.detach().cpu() for name, p in parameters.items()})


@functools.lru_cache(maxsize=64)
def theirs(run: Run) -> Outcome:
    """FSDP2's run, kept: block policies make no difference to it."""
    return sharded("fsdp2", run)


def distance(a: Outcome, b: Outcome) -> tuple[float, float]:
    """Losses and parameters of two runs; `Report` says how."""
    losses = max(abs(x - y) / abs(y) for x, y in zip(a.losses, b.losses, strict=True))
    assert a.parameters.keys() == b.parameters.keys()
    return losses, max(
        ((value - b.parameters[name]).abs().max() / b.parameters[name].abs().max()).item()
        for name, value in a.parameters.items()
    )


def same_bits(a: Outcome, b: Outcome) -> bool:
    return a.losses == b.losses and all(torch.equal(v, b.parameters[k]) for k, v in a.parameters.items())


def compare(run: Run, system: str = "ours") -> Report | None:
    """On every rank of a launch: train all three ways. The report is rank 0's, which alone trains alone."""
    ours, fsdp2 = sharded(system, run), theirs(run.twin)
    if dist.get_rank() != 0:
        return None
    one = alone(run.single)
    return Report(*distance(ours, one), *distance(fsdp2, one), *distance(ours, fsdp2), same_bits(ours, fsdp2))


def compare_all(runs: list[Run], system: str = "ours") -> list[Report | None]:
    return [compare(run, system) for run in runs]
