"""What each rank of a run will hold, worked out before anything is allocated, and how far a run was from it.

The units are sharded for real, on the meta device, in one process that stands for one rank of many; `timeline`
replays a step of theirs. The peak is

    parameter shards + optimizer state                    for good
    + the larger of: gathered buffers, gradients and activations, at the worst moment of forward and backward
                     gradient shards and temporaries of the optimizer's step
"""

import dataclasses
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_runtime import unit_memory
from ragged_shard.testing import simulated_ranks

from .config import RunConfig
from .corpus import read_data
from .errors import TrainError
from .hardware import pick_device
from .launch import pick_ranks, start_ranks
from .losses import losses_of
from .memory import LiveBytes
from .model import Transformer
from .optimizers import make_optimizer, optimizer_spec
from .systems import Runtime, wrap_order
from .timeline import ENDS, Buffers, Replay, record
from .trainer import MEASURED_STEP, model_config

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
        """The same if reductions end at once, as on the last rank to begin, or after the next unit's last gradient."""
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
    if config.system != "fsdp_runtime":
        raise TrainError(f"plan knows the buffers of fsdp_runtime, not of {config.system}")
    if config.hf_config:
        raise TrainError("plan works out activations for the built-in model, not for --hf-config")
    sizes = model_config(config, vocab_size)
    device = pick_device(config.device)
    if dist.is_initialized():
        raise TrainError("a plan takes torch.distributed for itself, which is in use in this process")
    with simulated_ranks(world_size, rank=rank, collectives="refuse"):
        mesh = init_device_mesh(device.type, (world_size,))
        with torch.device("meta"):
            model: nn.Module = Transformer(sizes)
        layer_modules = wrap_order(model)
        Runtime(config, device, mesh).shard(model)
        try:
            optimizer = make_optimizer(
                config.optimizer, model, lr=config.lr, weight_decay=config.weight_decay
            )
        except NotImplementedError as error:  # it wants to compare ranks, or values
            raise TrainError(
                f"plan cannot build {config.optimizer} on the meta device: use another"
            ) from error
        step = _optimizer_step_bytes(model, optimizer, optimizer_spec(config.optimizer).takes_norm)
        of_layers = [list(layer.parameters()) for layer in layer_modules]
        inner = {id(param) for params in of_layers for param in params}
        of_root = [param for param in model.parameters() if id(param) not in inner]
        units = tuple(
            _unit_plan(module, params, optimizer)
            for module, params in zip([model, *layer_modules], [of_root, *of_layers], strict=True)
        )

    def build() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if config.precision == "bf16" else torch.float32)
        try:
            return Transformer(sizes, checkpointing=config.checkpointing)
        finally:
            torch.set_default_dtype(before)

    def run(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        cross_entropy, aux = losses_of(model, tokens, targets)
        return cross_entropy + config.model.aux_weight * aux

    rows = config.batch // (world_size * config.accumulate)
    moments = record(build, wrap_order, run, rows, config.seq_len, device)
    buffers = [unit.buffers for unit in units]
    at_once, soon, late = (Replay(buffers, config.accumulate > 1, ends).run(moments) for ends in ENDS)
    return MemoryPlan(
        units=units,
        buffers=late.buffers_peak,
        activations=max(moment.live for moment in moments),
        pass_peaks=(at_once.peak, soon.peak, late.peak),
        optimizer_step=step,
    )


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


def print_plan(config: RunConfig, asked_ranks: int | None) -> int:
    """Print a run's plan; with ``measure`` also run a few steps and print how far the measured peak was from it.

    Returns 0.
    """
    ranks = pick_ranks(config, asked_ranks)
    config.check(ranks)
    data = read_data(
        config.data,
        dtype=config.dtype,
        vocab_size=config.vocab_size,
        held_out=config.held_out,
        seq_len=config.seq_len,
    )
    plan = make_plan(config, data.vocab_size, ranks)
    for line in plan_lines(plan, ranks):
        print(line)
    if not config.measure:
        return 0
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
            f"step {MEASURED_STEP}, measured {text}: {_mb(measured)} MB, {off:+.1f} % from {_mb(planned)} MB planned"
        )
    return 0


def plan_lines(plan: MemoryPlan, ranks: int) -> list[str]:
    """The plan as a markdown table and sums."""
    lines = [
        f"rank 0 of {ranks}; MB are 10^6 bytes",
        "",
        "| unit | parameters | shard (elements) | padding | weights MB | gradients MB | optimizer MB | gathered MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for unit in plan.units:
        shard = " + ".join(f"{size:,}" for size in unit.shards)
        lines.append(
            f"| {unit.name} | {unit.parameters:,} | {shard} | {100 * unit.padding:.2f} % | {_mb(unit.weights)} "
            f"| {_mb(unit.buffers.gradients)} | {_mb(unit.state)} | {_mb(sum(unit.buffers.gathered))} |"
        )
    held = [
        ("weights, their codes, optimizer state, for good", plan.at_rest),
        ("gradients, when all are there", plan.gradients),
        ("gathered buffers, at most", plan.buffers),
        ("activations and temporaries, at most", plan.activations),
        ("the last three together, at most", plan.pass_peaks[-1]),
        ("temporaries of the optimizer's step", plan.optimizer_step),
        ("sent by one gather of every unit", (ranks - 1) * sum(unit.given for unit in plan.units)),
        ("sent by one reduction of every unit", (ranks - 1) * sum(unit.reduced for unit in plan.units)),
        ("peak if reductions are over at once", plan.bounds[0]),
        ("peak if they take the next unit's backward", plan.bounds[1]),
        ("reserved on CUDA, at least (an estimate)", plan.reserved),
        ("expected peak, half-way", plan.peak),
    ]
    return [*lines, "", *(f"{text + ':':<48}{_mb(nbytes):>12} MB" for text, nbytes in held)]


def _mb(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / 1e6:,.2f}"
