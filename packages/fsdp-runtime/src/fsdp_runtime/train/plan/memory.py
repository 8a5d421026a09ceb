"""Memory of each rank of a run, before anything is allocated.

The units are sharded for real, on the meta device, in one process that stands for one rank of many. Activations are
recorded on fake tensors; `step_peaks` adds the buffers in use at each moment. The peak is

    parameter shards + optimizer state and scratch        for good
    + the larger of: gathered buffers, gradients and activations, at the worst moment of forward and backward
                     gradient shards and temporaries of the optimizer's step
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from fsdp_runtime.memory import LiveBytes, UnitMemory, unit_memory
from ragged_shard import DeviceLayer, use_device_layer
from ragged_shard.testing import simulated_ranks

from ..config import RunConfig
from ..errors import TrainError, one_line
from ..hardware import pick_device
from ..model import Transformer, losses_from
from ..optimizers import make_optimizer, optimizer_spec
from ..parallel.meshes import Meshes, make_meshes
from ..parallel.runtime import SplitRuntime
from ..parallel.tensor_parallel import parallelize
from ..systems import wrap_order
from ..trainer import model_config
from .models import build_planned, has_forward
from .peaks import Moment, record, step_peaks, without_activations


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
    pass_peak: int  # the most bytes of both with gradients
    optimizer_step: int | None  # temporaries; None: not known
    scratch: int  # buffers that the optimizer keeps

    @property
    def weights(self) -> int:
        """Bytes of parameter shards, and of codes that are kept in addition."""
        return sum(unit.weights + unit.codes for unit in self.units)

    @property
    def state(self) -> int:
        """Bytes of the optimizer's state."""
        return sum(unit.state for unit in self.units)

    @property
    def at_rest(self) -> int:
        """Bytes between steps, when gradients are cleared."""
        return self.weights + self.state + self.scratch

    @property
    def gradients(self) -> int:
        """Bytes of gradient shards when all are there."""
        return sum(unit.gradients for unit in self.units)

    @property
    def peak(self) -> int:
        """The most live bytes of a step, once the order of units is known (from the second step on).

        If reductions end with the next unit's backward; where they end sooner, a step holds a few percent less.
        """
        return self.at_rest + max(self.pass_peak, self.gradients + (self.optimizer_step or 0))


def make_plan(config: RunConfig, vocab_size: int, world_size: int, rank: int = 0) -> MemoryPlan:
    """Plan a run of fsdp_runtime. Allocates nothing but what planning needs; takes torch.distributed for itself.

    Raises:
        TrainError: another system, or an optimizer that is not there or needs values.
    """
    if dist.is_initialized():
        raise TrainError("a plan takes torch.distributed for itself, which is in use in this process")
    with simulated_ranks(world_size, rank=rank, collectives="skip"):
        return plan_here(config, vocab_size)


def plan_here(config: RunConfig, vocab_size: int) -> MemoryPlan:
    """`make_plan` inside `simulated_ranks`, for several plans: DTensor caches process groups by name.

    Raises:
        TrainError: as `make_plan`.
    """
    if config.system != "fsdp_runtime":
        raise TrainError(f"plan knows the buffers of fsdp_runtime, not of {config.system}")
    if config.offload_activations:
        raise TrainError("--offload-activations: plan counts all memory as the device's")
    device = pick_device(config.device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    splits = config.splits(world_size)
    meshes = make_meshes(splits, device.type)
    stages, step, scratch = _sharded(config, vocab_size, meshes, device)
    passes = stage_passes(config, vocab_size, meshes, device)
    passes_held = splits.passes_held(rank * splits.pp // world_size, config.accumulate)
    waiting = (passes_held - 1) * sum(map(_kept, passes)) // len(passes)
    # A forward follows the first backward.
    gathered = splits.pp > 1 and passes_held < len(passes) * config.accumulate
    if gathered:  # gradients are reduced after the last microbatch, of all units
        waiting += sum(sum(unit.reducing) + unit.gradients for units in stages for unit in units)
    peak = buffers = 0
    for units, moments in zip(stages, passes, strict=True):
        own = units
        if gathered:  # nothing is reduced after this microbatch
            own = [replace(unit, reducing=(), gradients=0, scratch=0) for unit in units]
        of_pass, of_buffers = step_peaks(own, moments)
        if config.accumulate > 1:  # the gradient shards of an earlier microbatch
            of_pass += sum(unit.gradients for unit in own)
        peak, buffers = max(peak, of_pass + waiting), max(buffers, of_buffers)
    return MemoryPlan(
        units=tuple(unit for units in stages for unit in units),
        buffers=buffers,
        activations=max(moment.live for moments in passes for moment in moments) + waiting,
        pass_peak=peak,
        optimizer_step=step,
        scratch=scratch,
    )


def _sharded(
    config: RunConfig, vocab_size: int, meshes: Meshes, device: torch.device
) -> tuple[list[list[UnitPlan]], int | None, int]:
    """The units of each of this rank's stages, the stage itself first; bytes of the optimizer's step and scratch."""
    system = SplitRuntime(config, device, meshes)
    with torch.device("meta"):
        whole = build_planned(config, vocab_size)
    model = system.divide(whole)
    layers = [wrap_order(stage) for stage in system.stages]
    for stage in system.stages:
        system.shard(stage)
    spec, live = optimizer_spec(config.optimizer), LiveBytes()
    with use_device_layer(DeviceLayer(torch.device("meta"))):  # nothing moves there, and nothing waits
        with live:
            optimizer = make_optimizer(
                config.optimizer, model, lr=config.lr, weight_decay=config.weight_decay
            )
        kept, step = _optimizer_step_bytes(model, optimizer, spec.takes_norm)
    stages = []
    for stage, inside in zip(system.stages, layers, strict=True):
        of_layers = [list(layer.parameters()) for layer in inside]
        inner = {id(param) for params in of_layers for param in params}
        of_stage = [param for param in stage.parameters() if id(param) not in inner]
        pairs = zip([stage, *inside], [of_stage, *of_layers], strict=True)
        stages.append([_unit_plan(module, params, optimizer) for module, params in pairs])
    state = sum(unit.state for units in stages for unit in units)
    # Muon's exchange between ranks is the same everywhere; scratch of elementwise kernels is small on real devices.
    return stages, step, live.now + kept - state if spec.routed else 0


def _kept(moments: list[Moment]) -> int:
    """Bytes that are kept between forward and backward."""
    return next(moment.live for moment in moments if (moment.what, moment.unit) == ("leave", 0))


def stage_passes(
    config: RunConfig, vocab_size: int, meshes: Meshes, device: torch.device
) -> list[list[Moment]]:
    """Moments of one microbatch through each of this rank's stages, forward and backward."""
    splits = meshes.splits
    rows = config.batch // (splits.readers * config.accumulate)
    if config.hf_config:
        return [_undivided_pass(replace(config, hsdp=1), rows, device)]
    sizes, dtype = model_config(config, vocab_size), _compute_dtype(config)
    length = config.seq_len // splits.cp
    numbers = splits.stages_of(meshes.rank_of("pp")) if splits.pp > 1 else [0]

    def build(number: int) -> nn.Module:
        model = Transformer(sizes, checkpointing=config.checkpointing)
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
        return [
            record(partial(build, number), wrap_order, run, dtype, rows, length, device) for number in numbers
        ]


@lru_cache(maxsize=1)  # other splits, the same pass
def _undivided_pass(config: RunConfig, rows: int, device: torch.device) -> list[Moment]:
    """The pass of a model of ``--hf-config``; of one without forward all live bytes are 0."""
    build = partial(build_planned, config, 1)
    if not has_forward(config):
        with torch.device("meta"):
            return without_activations(len(wrap_order(build())))

    def run(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return losses_from(model(tokens), targets)[0]

    try:
        return record(build, wrap_order, run, _compute_dtype(config), rows, config.seq_len, device)
    except Exception as error:  # whatever a forward does without values
        raise TrainError(
            f"{config.hf_config}: forward and backward fail on tensors without values in {config.precision} (plan the "
            f"checkpoint's safetensors for all but activations): {one_line(error)}"
        ) from error


def _compute_dtype(config: RunConfig) -> torch.dtype:
    return torch.bfloat16 if config.precision == "bf16" else torch.float32


def _unit_plan(
    module: nn.Module, params: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer
) -> UnitPlan:
    values = [value for param in params for value in optimizer.state[param].values()]
    local = [value.to_local() if hasattr(value, "to_local") else value for value in values]
    state = sum(value.nbytes for value in local if isinstance(value, torch.Tensor))
    return UnitPlan(**vars(unit_memory(module)), state=state)


def _optimizer_step_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer, takes_norm: bool
) -> tuple[int, int | None]:
    """Bytes that the first step makes and keeps, and the peak of what a later one makes; None if it needs values.

    Makes the state of optimizers that do so in their first step.
    """
    step: Callable[..., Any] = optimizer.step
    live, kept = LiveBytes(), 0
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        kept, live = live.now, LiveBytes()
        try:
            with live:
                step(grad_norm=1.0) if takes_norm else step()
        except (RuntimeError, NotImplementedError):  # a matrix's root, or an exchange between ranks
            return kept, None
        finally:
            optimizer.zero_grad(set_to_none=True)
    return kept, live.peak
