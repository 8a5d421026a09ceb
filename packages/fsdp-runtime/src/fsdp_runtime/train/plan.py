"""``fsdp-train plan``: what each rank of a run will hold and send, before anything is allocated, and which splits fit.

The units are sharded for real, on the meta device, in one process that stands for one rank of many. Activations are
recorded on fake tensors; `step_peaks` adds the buffers in use at each moment. The peak is

    parameter shards + optimizer state                    for good
    + the larger of: gathered buffers, gradients and activations, at the worst moment of forward and backward
                     gradient shards and temporaries of the optimizer's step
"""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from fsdp_runtime.memory import LiveBytes, UnitMemory, unit_memory
from ragged_shard.testing import simulated_ranks

from .config import RunConfig
from .data import read_data
from .errors import TrainError
from .hardware import device_memory, pick_device
from .launch import pick_ranks, start_ranks
from .model import ModelConfig, Transformer, losses_from
from .optimizers import make_optimizer, optimizer_spec
from .parallel.meshes import Meshes, make_meshes
from .parallel.runtime import SplitRuntime
from .parallel.tensor_parallel import parallelize
from .peaks import ENDS, Moment, record, step_peaks
from .splits import AXES, Splits
from .systems import wrap_order
from .traffic import traffic_lines, traffic_of
from .trainer import MEASURED_STEP, model_config


@dataclass(frozen=True)
class UnitPlan(UnitMemory):
    """One unit on one rank.

    Attributes:
        state: bytes of the optimizer's state.
    """

    state: int


@dataclass(frozen=True)
class MemoryPlan:
    """All units on one rank, the root first, and what is held in addition."""

    units: tuple[UnitPlan, ...]
    buffers: int  # the most bytes of gathered buffers
    activations: int  # the most bytes of activations and temporaries
    pass_peaks: tuple[int, int, int]  # of both with gradients: reductions end at once, soon or late
    optimizer_step: int | None  # temporaries; None: not known

    @property
    def at_rest(self) -> int:
        """Bytes between steps, when gradients are cleared."""
        return sum(unit.weights + unit.state + unit.codes for unit in self.units)

    @property
    def gradients(self) -> int:
        """Bytes of gradient shards when all are there."""
        return sum(unit.gradients for unit in self.units)

    @property
    def peak(self) -> int:
        """The most live bytes of a step, once the order of units is known (from the second step on).

        Half-way between reductions that end before the next unit's first gradient, and after its last: where in its
        backward one ends is a matter of the wire.
        """
        _, soon, late = self._peaks
        return (soon + late) // 2

    @property
    def bounds(self) -> tuple[int, int]:
        """The peak if reductions end at once, as on the last rank to begin, or after the next unit's last gradient.

        The lower one counts no scratch of reductions, which a transport may hold where no meter of tensors sees it.
        """
        least, _, most = self._peaks
        return least, most

    @property
    def _peaks(self) -> tuple[int, int, int]:
        update = self.gradients + (self.optimizer_step or 0)
        at_once, soon, late = (self.at_rest + max(most, update) for most in self.pass_peaks)
        return at_once, soon, late


def make_plan(config: RunConfig, vocab_size: int, world_size: int, rank: int = 0) -> MemoryPlan:
    """Plan a run of fsdp_runtime. Allocates nothing but what planning needs; takes torch.distributed for itself.

    Raises:
        TrainError: another system, a transformers model, or an optimizer that is not there or needs values.
    """
    if dist.is_initialized():
        raise TrainError("a plan takes torch.distributed for itself, which is in use in this process")
    splits = config.splits(world_size)
    exchanges = splits.slices > 1 or splits.ep > 1  # inside forward and backward; their values are not used
    with simulated_ranks(world_size, rank=rank, collectives="skip" if exchanges else "refuse"):
        return plan_here(config, vocab_size)


def plan_here(config: RunConfig, vocab_size: int) -> MemoryPlan:
    """`make_plan` inside `simulated_ranks`, for several plans: DTensor caches process groups by name.

    Raises:
        TrainError: as `make_plan`.
    """
    if config.system != "fsdp_runtime":
        raise TrainError(f"plan knows the buffers of fsdp_runtime, not of {config.system}")
    if config.offload:
        raise TrainError(f"--offload {','.join(config.offload)}: plan counts all memory as the device's")
    if config.hf_config:
        raise TrainError("plan works out activations for the built-in model, not for --hf-config")
    sizes, device = model_config(config, vocab_size), pick_device(config.device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    splits = config.splits(world_size)
    meshes = make_meshes(splits, device.type)
    stages, step = _sharded(config, sizes, meshes, device)
    passes = stage_passes(config, sizes, meshes, device)
    passes_held = splits.passes_held(rank * splits.pp // world_size, config.accumulate)
    waiting = (passes_held - 1) * sum(stage.kept for stage in passes) // len(passes)
    # A forward follows the first backward.
    gathered = splits.pp > 1 and passes_held < len(passes) * config.accumulate
    if gathered:  # gradients are reduced after the last microbatch, of all units
        waiting += sum(sum(unit.reducing) + unit.gradients for units in stages for unit in units)
    peaks, buffers = [], 0
    for units, stage in zip(stages, passes, strict=True):
        own = units
        if gathered:  # nothing is reduced after this microbatch
            own = [replace(unit, reducing=(), gradients=0, scratch=0) for unit in units]
        waiting_shards = _shards(own) if config.accumulate > 1 else 0
        of_ends = [step_peaks(own, stage.moments, ends) for ends in ENDS]
        peaks.append([peak + waiting + waiting_shards for peak, _ in of_ends])
        buffers = max(buffers, of_ends[-1][1])
    at_once, soon, late = (max(of_stages) for of_stages in zip(*peaks, strict=True))
    return MemoryPlan(
        units=tuple(unit for units in stages for unit in units),
        buffers=buffers,
        activations=max(moment.live for stage in passes for moment in stage.moments) + waiting,
        pass_peaks=(at_once, soon, late),
        optimizer_step=step,
    )


def kept_peaks(config: RunConfig, vocab_size: int, plan: MemoryPlan) -> list[int]:
    """The most live bytes of a step where the last 0, 1, ... layers stay gathered between forward and backward.

    Where reductions take as long as they can. Called inside `simulated_ranks`; no pipeline.
    """
    sizes, device = model_config(config, vocab_size), pick_device(config.device)
    meshes = make_meshes(config.splits(dist.get_world_size()), device.type)
    moments = stage_passes(config, sizes, meshes, device)[0].moments
    update = plan.gradients + (plan.optimizer_step or 0)
    root, *layers = plan.units
    peaks = []
    for count in range(len(layers) + 1):
        first = len(layers) - count
        own = [root, *(replace(layer, kept_after_forward=n >= first) for n, layer in enumerate(layers))]
        peak, _ = step_peaks(own, moments, "late")
        peak += _shards(own) if config.accumulate > 1 else 0
        peaks.append(plan.at_rest + max(peak, update))
    return peaks


def _shards(units: list[UnitPlan]) -> int:
    """Bytes of the gradient shards of an earlier microbatch."""
    return sum(unit.gradients for unit in units)


def _sharded(
    config: RunConfig, sizes: ModelConfig, meshes: Meshes, device: torch.device
) -> tuple[list[list[UnitPlan]], int | None]:
    """The units of each of this rank's stages, the stage itself first, and what the optimizer's step takes."""
    system = SplitRuntime(config, device, meshes)
    with torch.device("meta"):
        whole = Transformer(sizes)
    model = system.divide(whole)
    layers = [wrap_order(stage) for stage in system.stages]
    for stage in system.stages:
        system.shard(stage)
    try:
        optimizer = make_optimizer(config.optimizer, model, lr=config.lr, weight_decay=config.weight_decay)
    except NotImplementedError as error:  # it wants to compare ranks, or values
        raise TrainError(f"plan cannot build {config.optimizer} on the meta device: use another") from error
    step = _optimizer_step_bytes(model, optimizer, optimizer_spec(config.optimizer).takes_norm)
    stages = []
    for stage, inside in zip(system.stages, layers, strict=True):
        of_layers = [list(layer.parameters()) for layer in inside]
        inner = {id(param) for params in of_layers for param in params}
        of_stage = [param for param in stage.parameters() if id(param) not in inner]
        pairs = zip([stage, *inside], [of_stage, *of_layers], strict=True)
        stages.append([_unit_plan(module, params, optimizer) for module, params in pairs])
    return stages, step


@dataclass(frozen=True)
class Pass:
    """One microbatch through one stage, forward and backward: its moments, and bytes kept between the two."""

    moments: list[Moment]
    kept: int


def stage_passes(config: RunConfig, sizes: ModelConfig, meshes: Meshes, device: torch.device) -> list[Pass]:
    """Live bytes of each of this rank's stages, besides parameters and kept gradients."""
    splits = meshes.splits
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    length, rows = config.seq_len // splits.cp, config.batch // (splits.readers * config.accumulate)
    numbers = splits.stages_of(meshes.rank_of("pp")) if splits.pp > 1 else [0]

    def build(number: int) -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model = Transformer(sizes, checkpointing=config.checkpointing)
        finally:
            torch.set_default_dtype(before)
        if not splits.plain:
            parallelize(model, meshes, config.seq_len)
        return model if splits.pp == 1 else model.stage(splits.layers_of(number, sizes.num_layers))

    def run(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        first, last = getattr(model, "embed", None) is not None, getattr(model, "head", None) is not None
        shape = rows, length // splits.tp, sizes.dim
        x = tokens if first else torch.zeros(shape, dtype=dtype, device=tokens.device, requires_grad=True)
        out = model(x)
        if not last:
            return torch.as_tensor(out[0].float().sum() + out[1])
        cross_entropy, aux = losses_from(out, targets)
        return cross_entropy + config.model.aux_weight * aux

    passes = []
    with loss_parallel() if splits.tp > 1 else nullcontext():
        for number in numbers:
            moments = record(partial(build, number), wrap_order, run, rows, length, device)
            kept = [moment.live for moment in moments if (moment.what, moment.unit) == ("leave", 0)]
            passes.append(Pass(moments, kept[0]))
    return passes


def _unit_plan(
    module: nn.Module, params: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer
) -> UnitPlan:
    values = [value for param in params for value in optimizer.state[param].values()]
    local = [value.to_local() if hasattr(value, "to_local") else value for value in values]
    state = sum(value.nbytes for value in local if isinstance(value, torch.Tensor))
    return UnitPlan(**vars(unit_memory(module)), state=state)


def _optimizer_step_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, takes_norm: bool) -> int | None:
    """Peak bytes that a step makes in addition to its state, or None where a step cannot be made without values.

    Makes the state of optimizers that do so in their first step.
    """
    step: Callable[..., Any] = optimizer.step
    live = LiveBytes()
    for _ in range(2):  # states come with the first step
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        live = LiveBytes()
        try:
            with live:
                step(grad_norm=1.0) if takes_norm else step()
        except (RuntimeError, NotImplementedError):  # a matrix's root, or an exchange between ranks
            return None
        finally:
            optimizer.zero_grad(set_to_none=True)
    return live.peak


def plan_lines(plan: MemoryPlan, ranks: int, splits: Splits | None = None) -> list[str]:
    """The plan as a markdown table and sums; what is sent only where all parameters are sharded over the same ranks."""
    lines = [
        f"rank 0 of {ranks}; MB are 10^6 bytes",
        "",
        "| unit | parameters | shard (elements) | padding | weights MB | gradients MB | optimizer MB | gathered MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for unit in plan.units:
        shard = " + ".join(f"{size:,}" for size in unit.shards)
        padding = unit.padding / (unit.padding + unit.parameters)
        lines.append(
            f"| {unit.name} | {unit.parameters:,} | {shard} | {100 * padding:.2f} % | {megabytes(unit.weights)} "
            f"| {megabytes(unit.gradients)} | {megabytes(unit.state)} "
            f"| {megabytes(sum(unit.gathered))} |"
        )
    over = splits.shards if splits else ranks
    sent = [
        ("sent by one gather of every unit", (over - 1) * sum(unit.given for unit in plan.units)),
        ("sent by one reduction of every unit", (over - 1) * sum(unit.reduced for unit in plan.units)),
    ]
    rows = [
        ("weights, their codes, optimizer state, for good", plan.at_rest),
        ("gradients, when all are there", plan.gradients),
        ("gathered buffers, at most", plan.buffers),
        ("activations and temporaries, at most", plan.activations),
        ("the last three together, at most", plan.pass_peaks[-1]),
        ("temporaries of the optimizer's step", plan.optimizer_step),
        *(sent if splits is None or splits.one_mesh else ()),
        ("peak if reductions are over at once", plan.bounds[0]),
        ("peak if they take the next unit's backward", plan.bounds[1]),
        ("expected peak, half-way", plan.peak),
    ]
    return [*lines, "", *(f"{text + ':':<48}{megabytes(nbytes):>12} MB" for text, nbytes in rows)]


def megabytes(nbytes: int | None) -> str:
    """Format bytes as MB (10^6)."""
    return "unknown" if nbytes is None else f"{nbytes / 1e6:,.2f}"


def split_config(config: RunConfig, asked: Mapping[str, int]) -> RunConfig:
    """The run with other splits: a number for each of `AXES`."""
    changes: dict[str, Any] = {axis: asked[axis] for axis in AXES}
    return dataclasses.replace(config, **changes)


def candidates(config: RunConfig, world_size: int) -> list[Splits]:
    """Every split of the ranks that the run allows, in no order."""
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    experts = divisors if config.model.num_experts else [1]
    allowed = []
    for sizes in product(divisors, divisors, divisors, divisors, experts):
        chosen = split_config(config, dict(zip(AXES, sizes, strict=True)))
        with suppress(TrainError):
            chosen.check(world_size)
            allowed.append(chosen.splits(world_size))
    return allowed


_GIB = 1 << 30
_ASSUMED_GIB = 80.0  # where this machine has no GPU
_SHOWN, _PLANNED = 12, 40  # splits that are printed, and planned at most
_SENT = ("fsdp", "hsdp", "tp", "cp", "ep", "pp")


def print_plan(config: RunConfig, asked_ranks: int | None, gib: float | None = None) -> int:
    """Print a run's plan, and the splits of its ranks where it asks for none.

    With ``measure`` also run a few steps and print how far the measured peak was from it. `gib` is what a rank may
    hold. Returns 0.

    Raises:
        TrainError: what was asked for does not fit together, under any splits where it asks for none.
    """
    ranks = asked_ranks if asked_ranks and not config.measure else pick_ranks(config, asked_ranks)
    data = read_data(
        config.data,
        dtype=config.dtype,
        vocab_size=config.vocab_size,
        held_out=config.held_out,
        seq_len=config.seq_len,
    )
    sizes = model_config(config, data.vocab_size)
    chosen = any(getattr(config, axis) > 1 for axis in AXES)
    list_splits = not (chosen or config.measure or config.hf_config or config.system != "fsdp_runtime")
    try:
        config.check(ranks)
    except TrainError as error:
        if not list_splits or not candidates(config, ranks):
            raise
        print(f"without splits: {error}\n")
    else:
        splits, plan = config.splits(ranks), make_plan(config, data.vocab_size, ranks)
        print(*plan_lines(plan, ranks, splits), "", *traffic_lines(config, sizes, splits), "", sep="\n")
        if config.system == "fsdp_runtime" and config.pp == 1 and config.reshard:
            with simulated_ranks(ranks, collectives="skip"):
                peaks = kept_peaks(config, data.vocab_size, plan)
            print(*curve_lines(config, sizes, ranks, peaks), "", sep="\n")
        if config.measure:
            _measure(config, ranks, plan)
    if list_splits:
        with simulated_ranks(ranks, collectives="skip"):
            print(*splits_lines(config, sizes, ranks, gib), sep="\n")
    return 0


def curve_lines(config: RunConfig, sizes: ModelConfig, ranks: int, peaks: list[int]) -> list[str]:
    """A Markdown table of peak memory and bytes sent, by the number of layers that stay gathered.

    Raises:
        TrainError: not even freeing all of them fits ``config.memory_budget``.
    """
    budget = config.memory_budget
    if budget is not None and min(peaks) > budget:
        raise TrainError(
            f"--memory-budget {budget:,}: a rank is planned to hold {min(peaks):,} bytes at least, with every layer "
            "freed after forward"
        )
    fits = [kept for kept, peak in enumerate(peaks) if budget is None or peak <= budget]
    rows = []
    shown = {round(i * (len(peaks) - 1) / (_SHOWN - 1)) for i in range(_SHOWN)} | {fits[-1]}
    for kept in sorted(shown):
        sent = traffic_of(config, sizes, config.splits(ranks), kept=kept).fsdp
        chosen = ", as many as fit" if budget is not None and kept == fits[-1] else ""
        rows.append(f"| {kept}{chosen} | {megabytes(peaks[kept])} | {sent / 1e6:,.2f} |")
    return [
        "memory against bytes sent (--memory-budget): the last layers that stay gathered after forward",
        "",
        "| layers | peak MB | MB sent: fsdp |",
        "| --- " * 3 + "|",
        *rows,
    ]


def _measure(config: RunConfig, ranks: int, plan: MemoryPlan) -> None:
    sys.stdout.flush()
    short = dataclasses.replace(
        config, steps=MEASURED_STEP, save_every=0, eval_every=0, plot=False, resume=False
    )
    summary = start_ranks(short, ranks, quiet=True).summary
    for text, planned, measured in (
        ("live bytes before it", plan.at_rest, summary["measured_rest"]),
        ("peak", plan.peak, summary["measured_peak"]),
    ):
        off = 100 * (measured / planned - 1)
        print(
            f"step {MEASURED_STEP}, measured {text}: {megabytes(measured)} MB, {off:+.1f} % from "
            f"{megabytes(planned)} MB planned"
        )


def splits_lines(config: RunConfig, sizes: ModelConfig, ranks: int, gib: float | None) -> list[str]:
    """A Markdown table of the splits that fit in memory, those that send the fewest bytes first.

    Called inside `simulated_ranks`.

    Args:
        config, sizes: the run, and its model with the data's vocabulary.
        ranks: number of ranks to split.
        gib: GiB that a rank may hold; None takes this machine's GPU.
    """
    traffics = [(splits, traffic_of(config, sizes, splits)) for splits in candidates(config, ranks)]
    limit, whose = _ASSUMED_GIB * _GIB, "assumed; no GPU here"
    if gib is not None:
        limit, whose = gib * _GIB, "--memory"
    elif (memory := device_memory(pick_device(config.device))) is not None:
        limit, whose = memory, "this GPU's"
    rows: list[str] = []
    planned = 0
    for splits, traffic in sorted(traffics, key=lambda pair: pair[1].total):
        if len(rows) == _SHOWN or planned == _PLANNED:
            break
        planned += 1
        chosen = split_config(config, {axis: getattr(splits, axis) for axis in AXES})
        peak = plan_here(chosen, sizes.vocab_size).peak
        if peak <= limit:
            cells = " | ".join(f"{getattr(traffic, axis) / 1e6:,.1f}" for axis in _SENT)
            bubble = splits.bubble(config.accumulate)
            rows.append(
                f"| {splits} | {peak / _GIB:,.2f} | {bubble:.0%} | {traffic.total / 1e6:,.1f} | {cells} |"
            )
    lines = [
        f"{len(traffics)} splits of {ranks} ranks; those that hold at most {limit / _GIB:.2f} GiB ({whose}) among the "
        f"{planned} that send least:",
        "",
        f"| split | GiB a rank | bubble | MB sent | {' | '.join(_SENT)} |",
        "| --- " * (4 + len(_SENT)) + "|",
        *rows,
        "",
    ]
    if not rows:
        lines.append(
            "nothing fits: use more ranks, --checkpointing, or a smaller --batch with more --accumulate"
        )
    if config.accumulate == 1:
        lines.append("pipelines take microbatches: with --accumulate 2 or more there are splits with pp")
    return lines
