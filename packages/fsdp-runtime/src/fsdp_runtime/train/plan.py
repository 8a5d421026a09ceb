"""What each rank of a run will hold, worked out before anything is allocated, and how far a run was from it.

The units are sharded for real, on the meta device, in one process that stands for one rank of many; `timeline`
adds their buffers to activations. The peak is

    parameter shards + optimizer state                    for good
    + the larger of: gathered buffers, gradients and activations, at the worst moment of forward and backward
                     gradient shards and temporaries of the optimizer's step
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from fsdp_runtime import LiveBytes, unit_memory
from ragged_shard.testing import simulated_ranks

from .config import RunConfig
from .errors import TrainError
from .hardware import pick_device
from .losses import losses_from
from .model import ModelConfig, Transformer
from .optimizers import make_optimizer, optimizer_spec
from .parallel.meshes import Meshes, make_meshes
from .parallel.runtime import SplitRuntime
from .parallel.splits import Splits
from .parallel.tensor_parallel import parallelize
from .systems import wrap_order
from .timeline import ENDS, Buffers, Moment, record, step_peaks
from .trainer import model_config

_PIECE = 1 << 21  # bytes: what CUDA's caching allocator rounds large requests to


@dataclass(frozen=True)
class UnitPlan:
    """One unit on one rank. Bytes, but for `parameters` and `shards` (elements)."""

    name: str
    parameters: int
    shards: tuple[int, ...]  # shard sizes, a segment each
    padding: float  # of the buffer's elements
    weights: int
    state: int
    codes: int  # of quantized weights, kept from the first gather on
    given: int  # to each other rank by a gather
    reduced: int  # to each other rank by a reduction
    buffers: Buffers


@dataclass(frozen=True)
class MemoryPlan:
    """All units on one rank, the root first, and what is held in addition."""

    units: tuple[UnitPlan, ...]
    buffers: int  # the most bytes of gathered buffers
    activations: int  # the most bytes of activations and temporaries
    pass_peaks: tuple[
        int, int, int
    ]  # the most of both, with gradients: reductions over at once, soon and late
    optimizer_step: int | None  # temporaries; None: not known

    @property
    def at_rest(self) -> int:
        """Bytes between steps, when gradients are cleared."""
        return sum(unit.weights + unit.state + unit.codes for unit in self.units)

    @property
    def gradients(self) -> int:
        """Bytes of gradient shards when all are there."""
        return sum(unit.buffers.gradients for unit in self.units)

    @property
    def peak(self) -> int:
        """The most live bytes of a step, once the order of units is known (from the second step on).

        Half-way between reductions that end before the next unit's first gradient, and after its last: where in its
        backward one ends is a matter of the wire.
        """
        _, soon, late = self._peaks
        return (soon + late) // 2

    @property
    def reserved(self) -> int:
        """An estimate of what CUDA's caching allocator reserves: the later bound in whole pieces of 2 MiB.

        Gathered memory and activations share one pool. Fragmentation, and what NCCL and libraries hold, is not counted.
        """
        return -(-self.bounds[1] // _PIECE) * _PIECE

    @property
    def bounds(self) -> tuple[int, int]:
        """The same if reductions end at once, as on the last rank to begin, or after the next unit's last gradient.

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
    exchanges = (
        splits.slices > 1 or splits.ep > 1
    )  # inside forward and backward, whose values nobody looks at
    with simulated_ranks(world_size, rank=rank, collectives="skip" if exchanges else "refuse"):
        return plan_here(config, vocab_size)


def plan_here(config: RunConfig, vocab_size: int) -> MemoryPlan:
    """The same inside `simulated_ranks`, for several plans: DTensor keeps what it knows of a process group by its name.

    Raises:
        TrainError: as `make_plan`.
    """
    if config.system != "fsdp_runtime":
        raise TrainError(f"plan knows the buffers of fsdp_runtime, not of {config.system}")
    if config.hf_config:
        raise TrainError("plan works out activations for the built-in model, not for --hf-config")
    sizes, device = model_config(config, vocab_size), pick_device(config.device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    splits = config.splits(world_size)
    meshes = make_meshes(splits, device.type)
    stages, step = _sharded(config, sizes, meshes, device)
    passes = stage_passes(config, sizes, meshes, device)
    held = splits.passes_held(rank * splits.pp // world_size, config.accumulate)
    waiting = (held - 1) * sum(one.kept for one in passes) // len(passes)
    gathered = (
        splits.pp > 1 and held < len(passes) * config.accumulate
    )  # a forward follows the first backward
    if gathered:  # gradients are reduced after the last microbatch, of all units
        waiting += sum(
            sum(unit.buffers.reducing) + unit.buffers.gradients for units in stages for unit in units
        )
    peaks, buffers = [], 0
    for units, one in zip(stages, passes, strict=True):
        own = [unit.buffers.without_gradients() if gathered else unit.buffers for unit in units]
        waiting_shards = _shards(own) if config.accumulate > 1 else 0
        of_ends = [step_peaks(own, one.moments, ends) for ends in ENDS]
        peaks.append([peak + waiting + waiting_shards for peak, _ in of_ends])
        buffers = max(buffers, of_ends[-1][1])
    at_once, soon, late = (max(of_stages) for of_stages in zip(*peaks, strict=True))
    return MemoryPlan(
        units=tuple(unit for units in stages for unit in units),
        buffers=buffers,
        activations=max(moment.live for one in passes for moment in one.moments) + waiting,
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
    root, *layers = (unit.buffers for unit in plan.units)
    peaks = []
    for count in range(len(layers) + 1):
        first = len(layers) - count
        own = [root, *(replace(layer, keeps=number >= first) for number, layer in enumerate(layers))]
        peak, _ = step_peaks(own, moments, "late")
        peak += _shards(own) if config.accumulate > 1 else 0
        peaks.append(plan.at_rest + max(peak, update))
    return peaks


def _shards(units: list[Buffers]) -> int:
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
    """What each of this rank's stages holds in addition to parameters and kept gradients."""
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

    with loss_parallel() if splits.tp > 1 else nullcontext():
        return [_pass(partial(build, number), run, rows, length, device) for number in numbers]


def _pass(build: Callable[[], nn.Module], run: Any, rows: int, length: int, device: torch.device) -> Pass:
    moments = record(build, wrap_order, run, rows, length, device)
    kept = [moment.live for moment in moments if (moment.what, moment.unit) == ("leave", 0)]
    return Pass(moments, kept[0])


def _unit_plan(
    module: nn.Module, params: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer
) -> UnitPlan:
    memory = unit_memory(module)
    state = sum(_local_bytes(value) for param in params for value in optimizer.state[param].values())
    buffers = Buffers(
        memory.gathered,
        memory.reducing,
        memory.gradients,
        memory.kept_after_forward,
        memory.scratch,
        memory.decoding,
    )
    share = memory.padding / (memory.padding + memory.parameters)
    return UnitPlan(
        name=memory.name,
        parameters=memory.parameters,
        shards=memory.shards,
        padding=share,
        weights=memory.weights,
        state=state,
        codes=memory.codes,
        given=memory.given,
        reduced=memory.reduced,
        buffers=buffers,
    )


def _local_bytes(value: Any) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.numel() * local.element_size()


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
        lines.append(
            f"| {unit.name} | {unit.parameters:,} | {shard} | {100 * unit.padding:.2f} % | {megabytes(unit.weights)} "
            f"| {megabytes(unit.buffers.gradients)} | {megabytes(unit.state)} "
            f"| {megabytes(sum(unit.buffers.gathered))} |"
        )
    over = splits.shards if splits else ranks
    sent = [
        ("sent by one gather of every unit", (over - 1) * sum(unit.given for unit in plan.units)),
        ("sent by one reduction of every unit", (over - 1) * sum(unit.reduced for unit in plan.units)),
    ]
    held = [
        ("weights, their codes, optimizer state, for good", plan.at_rest),
        ("gradients, when all are there", plan.gradients),
        ("gathered buffers, at most", plan.buffers),
        ("activations and temporaries, at most", plan.activations),
        ("the last three together, at most", plan.pass_peaks[-1]),
        ("temporaries of the optimizer's step", plan.optimizer_step),
        *(sent if splits is None or splits.one_mesh else ()),
        ("peak if reductions are over at once", plan.bounds[0]),
        ("peak if they take the next unit's backward", plan.bounds[1]),
        ("reserved on CUDA, at least (an estimate)", plan.reserved),
        ("expected peak, half-way", plan.peak),
    ]
    return [*lines, "", *(f"{text + ':':<48}{megabytes(nbytes):>12} MB" for text, nbytes in held)]


def megabytes(nbytes: int | None) -> str:
    """As text, in 10^6 bytes."""
    return "unknown" if nbytes is None else f"{nbytes / 1e6:,.2f}"
