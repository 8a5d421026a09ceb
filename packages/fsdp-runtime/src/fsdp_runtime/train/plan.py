"""``fsdp-train plan``: the memory of one rank of a run, before anything is allocated.

`fully_shard` shards the model on the meta device, in one process that stands for one rank of many. Activations are
counted on fake tensors, with the buffers that the runtime has at each moment.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn

from fsdp_runtime.memory import UnitMemory, fake_tensors, unit_memory
from ragged_shard.device import DeviceLayer, use_device_layer
from ragged_shard.testing import simulated_ranks

from .._torch.tree import local_tensor
from .config import RunConfig
from .errors import TrainError, one_line
from .hardware import pick_device
from .launch import pick_ranks
from .live_bytes import LiveBytes
from .model import Transformer, losses_of
from .optimizers import make_optimizer, optimizer_spec
from .systems import Runtime, build_hf_model, make_mesh, wrap_order
from .trainer import data_of, model_config


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one rank; the root is the first unit."""

    units: tuple[UnitMemory, ...]
    states: tuple[int, ...]  # of the optimizer, by unit
    weights: int  # parameter shards, and codes that are kept in addition
    gradients: int  # shards, when all are there
    buffers: int  # the most bytes of gathered buffers
    activations: int  # the most bytes of activations and temporaries
    pass_peak: int  # the most bytes of both with gradients
    optimizer_step: int | None  # temporaries; None: not known
    scratch: int  # buffers that the optimizer keeps

    @property
    def at_rest(self) -> int:
        """Bytes between steps, when gradients are cleared."""
        return self.weights + sum(self.states) + self.scratch

    @property
    def peak(self) -> int:
        """The most live bytes of a step, from the second one on, if a reduction ends with the next unit's backward."""
        return self.at_rest + max(self.pass_peak, self.gradients + (self.optimizer_step or 0))


def make_plan(config: RunConfig, vocab_size: int, world_size: int) -> MemoryPlan:
    """Plan a run on rank 0. Raises `TrainError` for other systems and models that do not run without values."""
    if config.system != "fsdp_runtime" or config.offload_activations:
        raise TrainError(f"plan counts fsdp_runtime without --offload-activations, not {config.system}")
    device, spec, live = pick_device(config.device), optimizer_spec(config.optimizer), LiveBytes()
    with simulated_ranks(world_size, collectives="skip"):
        system = Runtime(config, device, make_mesh(config.hsdp, device.type))
        with torch.device("meta"):
            model = _build(config, vocab_size)
        modules = [model, *wrap_order(model)]
        system.shard(model)
        with use_device_layer(DeviceLayer(torch.device("meta"))):  # nothing moves there, and nothing waits
            with live:
                optimizer = make_optimizer(config.optimizer, model, lr=config.lr, weight_decay=0.1)
            kept, step = _step_bytes(model, optimizer, spec.takes_norm)
        units = tuple(map(unit_memory, modules))
        states = _states(modules, optimizer)
    one = _Pass(units)
    try:
        one.run(config, vocab_size, config.batch // (world_size * config.accumulate), device)
    except (RuntimeError, TypeError, NotImplementedError) as error:  # what a forward does without values
        raise TrainError(f"{config.hf_config} does not run without values: {one_line(error)}") from error
    gradients = sum(unit.gradients for unit in units)
    return MemoryPlan(
        units,
        states,
        weights=sum(unit.weights + unit.codes for unit in units),
        gradients=gradients,
        buffers=one.most_buffers,
        activations=one.alone.peak,
        pass_peak=one.live.peak + (gradients if config.accumulate > 1 else 0),  # of earlier microbatches
        optimizer_step=step,
        # Muon's exchange is the same on all devices; scratch of elementwise kernels is small on real ones.
        scratch=live.now + kept - sum(states) if spec.routed else 0,
    )


def _build(config: RunConfig, vocab_size: int) -> nn.Module:
    if config.hf_config is None:
        return Transformer(model_config(config, vocab_size), checkpointing=config.checkpointing)
    dtype = torch.get_default_dtype()
    return build_hf_model(config.hf_config, config.seed, vocab_size, config.checkpointing, dtype)


def _owners(modules: list[nn.Module]) -> dict[nn.Parameter, int]:
    """The unit of each parameter, by number; the root, which is first, has those that no other unit has."""
    return {param: number for number, module in enumerate(modules) for param in module.parameters()}


def _states(modules: list[nn.Module], optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """Bytes of the optimizer's state, by unit."""
    sizes = [0] * len(modules)
    for param, unit in _owners(modules).items():
        for value in optimizer.state[param].values():
            if isinstance(value, torch.Tensor):
                sizes[unit] += local_tensor(value).nbytes
    return tuple(sizes)


def _step_bytes(model: nn.Module, optimizer: Any, takes_norm: bool) -> tuple[int, int | None]:
    """Bytes that the first step makes and keeps, and the peak of a later one's temporaries; None if it needs values."""
    live, kept = LiveBytes(), 0
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        kept, live = live.now, LiveBytes()
        try:
            with live:
                optimizer.step(grad_norm=1.0) if takes_norm else optimizer.step()
        except (RuntimeError, NotImplementedError):  # a matrix's root, or an exchange between ranks
            return kept, None
        finally:
            optimizer.zero_grad(set_to_none=True)
    return kept, live.peak


class _Pass:
    """Forward and backward of one microbatch on fake tensors; gradients are dropped as they come."""

    def __init__(self, units: Sequence[UnitMemory]) -> None:
        self.units, self.alone = units, LiveBytes()  # activations, temporaries and new gradients
        self.live = LiveBytes(lambda: self.buffers + self.shards)  # and what the runtime holds
        self.buffers = self.shards = self.most_buffers = 0
        self._in_backward, self._reduced = False, set[int]()

    def run(self, config: RunConfig, vocab_size: int, rows: int, device: torch.device) -> None:
        before = torch.get_default_dtype()
        with fake_tensors():
            try:
                torch.set_default_dtype(torch.bfloat16 if config.precision == "bf16" else torch.float32)
                with torch.device(device):
                    model = _build(config, vocab_size).train()
                    tokens = torch.zeros(rows, config.seq_len, dtype=torch.int64)
            finally:
                torch.set_default_dtype(before)
            modules = [model, *wrap_order(model)]
            for unit, module in enumerate(modules):
                module.register_forward_pre_hook(partial(self._enter, unit))
                module.register_forward_hook(partial(self._leave, unit))
            for parameter, unit in _owners(modules).items():
                parameter.register_post_accumulate_grad_hook(partial(self._take, unit))
            with self.alone, self.live:
                loss, aux = losses_of(model, tokens, torch.zeros_like(tokens))
                self._in_backward = True
                (loss if config.hf_config else loss + config.model.aux_weight * aux).backward()
                self._at("end", 0)

    def _enter(self, unit: int, module: nn.Module, args: Any) -> None:
        if not self._in_backward:  # else recomputed
            self._at("enter", unit)
            if unit == 1:
                args[0].register_hook(lambda grad: self._at("done", 0))  # the layers' input

    def _leave(self, unit: int, module: nn.Module, args: Any, out: Any) -> None:
        if not self._in_backward:
            self._at("leave", unit)
            first = out if isinstance(out, torch.Tensor) else out[0]
            first.register_hook(lambda grad: self._at("backward", unit))

    def _take(self, unit: int, parameter: torch.Tensor) -> None:
        if unit not in self._reduced:
            self._reduced.add(unit)
            self._at("gradient", unit)
        parameter.grad = None

    def _at(self, what: str, unit: int) -> None:
        """Set the buffers in use: one unit is gathered ahead, one reduction runs until the next unit's ends."""
        units, last = self.units, len(self.units) - 1
        kept = [number for number in range(1, last + 1) if units[number].kept_after_forward]
        gathered, encoded, reducing, running = {0}, set[int](), set[int](), 0
        if what == "enter":
            ahead = min(unit + 1, last)
            gathered |= {unit, ahead, *(number for number in kept if number < unit)}
            encoded = {ahead} - {unit}
        elif what == "leave":
            gathered |= {number for number in kept if number <= (unit or last)}
        else:
            if what in ("backward", "gradient"):
                unit = unit or last + 1  # the root's backward comes first
                again = [number for number in range(last, 0, -1) if number not in kept][: last - unit + 2]
                encoded = {number for number in again if number < unit}
                gathered |= {number for number in (*kept, *again) if number <= unit}
            running = unit + 1 if unit < last else 0
            reducing = {0, running} | ({unit} if what == "gradient" and unit <= last else set())
            self.shards = sum(each.gradients for each in units[unit + 1 :])
            self.shards += units[running].scratch if running else 0
        used = sum(sum(units[number].gathered) for number in gathered)
        used += sum(sum(units[number].decoding) for number in encoded)
        used += sum(sum(units[number].reducing) for number in reducing)
        trimmed = what in ("done", "end") or (what == "leave" and unit in (0, last))
        # what is released stays in the pool till then
        self.buffers = used if trimmed else max(self.buffers, used)
        self.most_buffers = max(self.most_buffers, self.buffers)
        self.live.peak = max(self.live.peak, self.live.now + self.buffers + self.shards)


def plan_lines(plan: MemoryPlan, ranks: int) -> list[str]:
    """The plan as a Markdown table and sums."""
    lines = [
        f"rank 0 of {ranks}; MB are 10^6 bytes",
        "",
        "| unit | parameters | shard (elements) | padding | weights MB | gradients MB | optimizer MB | gathered MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    pairs = zip(plan.units, plan.states, strict=True)
    for _, equal in groupby(pairs, lambda pair: (dataclasses.replace(pair[0], name=""), pair[1])):
        (unit, state), *rest = equal
        name = f"{unit.name} to {rest[-1][0].name} ({len(rest) + 1}, each)" if rest else unit.name
        shard = " + ".join(f"{size:,}" for size in unit.shards)
        padding = unit.padding / (unit.padding + unit.parameters)
        sizes = (unit.weights, unit.gradients, state, sum(unit.gathered))
        cells = (name, f"{unit.parameters:,}", shard, f"{100 * padding:.2f} %", *map(_mb, sizes))
        lines.append(f"| {' | '.join(cells)} |")
    rows = [
        ("weights and their codes", plan.weights),
        ("optimizer state", sum(plan.states)),
        ("buffers that the optimizer keeps", plan.scratch),
        ("gradients, when all are there", plan.gradients),
        ("gathered buffers, at most", plan.buffers),
        ("activations and temporaries, at most", plan.activations),
        ("gradients, buffers, activations together, at most", plan.pass_peak),
        ("temporaries of the optimizer's step", plan.optimizer_step),
        ("peak", plan.peak),
    ]
    return [*lines, "", *(f"{text + ':':<52}{_mb(nbytes):>12} MB" for text, nbytes in rows)]


def _mb(nbytes: float | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / 1e6:,.2f}"


def print_plan(config: RunConfig, asked_ranks: int | None) -> int:
    """Print a run's plan; returns 0. Raises `TrainError` where options do not fit together."""
    ranks = asked_ranks or pick_ranks(config, None)
    config.check(ranks)
    vocab_size = 1 if config.hf_config else data_of(config).vocab_size  # such a model has its own
    print(*plan_lines(make_plan(config, vocab_size, ranks), ranks), sep="\n")
    return 0
