"""`tune`: how many units stay gathered between forward and backward, by measuring steps.

The last units in forward are kept: they are needed first in backward, so each holds its memory for the shortest time.

    lean step    every unit is freed after forward, none is gathered ahead     -> least
    bisection    the last n units are kept: does the measured peak fit?        -> the largest n that does
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ragged_shard import is_cpu, same_on_all_ranks

from .._params.unit import Unit
from .._schedule.model import member_of
from .._schedule.passes import Pass
from .._torch.tree import local_tensor
from .meter import StepMeter
from .units import unit_memory


@dataclass(frozen=True)
class Tuning:
    """The settings that `tune` chose, the same on every rank.

    Attributes:
        kept: names of the units that stay gathered between forward and backward, as backward needs them.
        prefetch_depth: how many units are gathered ahead.
        peak: the most live bytes of a measured step with it, on the rank that had most.
        least: the same with every unit freed after forward and none gathered ahead.
    """

    kept: tuple[str, ...]
    prefetch_depth: int
    peak: int
    least: int


class BudgetError(ValueError):
    """A memory budget below what a step takes.

    Attributes:
        least: bytes that a step takes at least, on the rank that needs most.
    """

    def __init__(self, budget: int, least: int) -> None:
        super().__init__(
            f"memory_budget={budget:,}: a step takes at least {least:,} bytes on the rank that needs most, with every "
            "unit freed after forward and none gathered ahead; allow that much, or use smaller batches, activation "
            "checkpointing or more ranks"
        )
        self.least = least


def tune(
    model: nn.Module,
    step: Callable[[], Any],
    *,
    memory_budget: int,
    meter: StepMeter | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tuning:
    """Keep as many units gathered between forward and backward as a memory budget allows.

        tune(model, lambda: loss_of(model, batch).backward(), memory_budget=8 << 30)

    Instead of choosing `reshard_after_forward` for each unit by hand. Keeps the last n units in forward, with the
    largest n whose measured step fits. The prefetch depth stays; it is 0 if not even n = 0 fits with it. The result is
    applied by `set_reshard_after_forward` and `set_prefetch_depth`, and changes no value: losses are bit for bit the
    same. Values of buffers and of torch's random generators are as before afterwards.

    The budget limits live bytes: on an accelerator all that its allocator has given out, so call this after the first
    optimizer step; on CPU the model's parameters and buffers, gathered buffers, and all tensors that the step makes.
    Reductions are assumed to be slow (worst case). Batches that need more activations than this one need more than the
    budget.

    Communicates one all-reduce of 64 bytes before the first step and one after it, and 8 bytes after each measured
    step. `step` is called 2 to 4 times, and once more for each doubling of the number of units.

    Args:
        model: the root, sharded with `fully_shard`, each unit with a bool or None as `reshard_after_forward`.
        step: runs forward and backward as training will, on all ranks; gradients are dropped afterwards. No optimizer.
        memory_budget: bytes that may be live on each rank, the same number on all.
        meter: measures the steps. Defaults to one of the bytes above.
        group: the ranks that call this together. Defaults to all ranks.

    Raises:
        BudgetError: the budget is below what a lean step takes. Nothing is changed.
        ValueError: ranks ran units in different orders, have different numbers of units or different budgets; on some
            rank the model is not a root, keeps parts among neighbors, prefetches by hand, has gradients, or has an
            optimizer in backward. The same on every rank, with the rank's name. Nothing is changed.
        RuntimeError: the order of units differs, and the first step's own comparison finds it.
    """
    problem, passes = None, None
    try:
        passes = _checked(model, memory_budget)
    except Exception as error:  # the other ranks must not wait for this one
        problem = error
    values = {"the number of units": len(passes.units) if passes else 0, "memory_budget": memory_budget}
    same_on_all_ranks(values, group, error=problem, caller="tune")
    assert passes is not None
    options = [(unit, unit.options.reshard_after_forward) for unit in passes.units]
    depth = passes.prefetch_depth
    trial = _Trial(model, passes, step, group, meter)
    try:
        with trial.undone():
            return _bisect(trial, memory_budget, depth)
    except BaseException:
        for unit, reshard in options:
            unit.configure(reshard_after_forward=reshard)
        passes.prefetch_depth = depth
        raise


def _bisect(trial: "_Trial", budget: int, depth: int) -> Tuning:
    trial.apply((), 0)
    trial.run()  # allocates what lives from the first step on
    order = trial.order()
    least = trial.peak()
    if least > budget:
        raise BudgetError(budget, least)
    peak = least
    if depth:
        trial.apply((), depth)
        ahead = trial.peak()
        depth, peak = (depth, ahead) if ahead <= budget else (0, least)
    fits, too_many = 0, len(order) + 1
    tried = len(order)  # most budgets allow everything or little: bisect after the first answer
    while too_many - fits > 1:
        trial.apply(order[:tried], depth)
        measured = trial.peak()
        if measured <= budget:
            fits, peak = tried, measured
        else:
            too_many = tried
        tried = (fits + too_many) // 2
    trial.apply(order[:fits], depth)
    return Tuning(tuple(unit.name for unit in order[:fits]), depth, peak, least)


def _checked(model: nn.Module, budget: int) -> Pass:
    member = member_of(model)
    if member is None or not member.unit.root:
        raise ValueError(
            f"{type(model).__name__} is not a root; pass the outermost module that fully_shard was called on"
        )
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise ValueError(f"memory_budget={budget!r}: expected a positive number of bytes")
    for unit in member.passes.units:
        options = unit.options
        if unit.keeps_slices:
            raise ValueError(f"{unit.name} has an integer as reshard_after_forward; shard with a bool")
        if options.forward_prefetch is not None or options.backward_prefetch is not None:
            raise ValueError(f"{unit.name} prefetches by hand (set_modules_to_..._prefetch)")
        if options.update is not None:
            raise ValueError("an optimizer in backward would update parameters; tune before it")
    for name, param in model.named_parameters():
        if param.grad is not None:
            raise ValueError(f"gradients are dropped, and {name} has one; call zero_grad() first")
    return member.passes


class _Trial:
    """Steps of one model that leave nothing behind."""

    def __init__(
        self,
        model: nn.Module,
        passes: Pass,
        step: Callable[[], Any],
        group: dist.ProcessGroup | None,
        meter: StepMeter | None,
    ) -> None:
        self._model, self._passes, self._step, self._group = model, passes, step, group
        self._recycler = passes.streams.recycler
        self._device = self._recycler.device
        self._others = 0  # bytes of other models' gathered buffers
        self._meter = meter or StepMeter(self._device, lambda: self._pooled() - self._others, self._resident)

    def _pooled(self) -> int:
        stats = self._recycler.stats
        return stats.lent_bytes + stats.parked_bytes

    def _resident(self) -> int:
        """Bytes of the model's parameters and buffers on this rank."""
        memories = [unit_memory(unit.modules[0]) for unit in self._passes.units]
        sharded = {id(param.sharded) for unit in self._passes.units for param in unit.params}
        params = [param for param in self._model.parameters() if id(param) not in sharded]
        storages = {
            (storage := local_tensor(tensor).untyped_storage())._cdata: storage.nbytes()
            for tensor in [*params, *self._model.buffers()]
        }
        return sum(memory.weights + memory.codes for memory in memories) + sum(storages.values())

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Afterwards random generators and buffers are as before."""
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        devices = [] if is_cpu(self._device) else [self._device]
        try:
            with torch.random.fork_rng(devices, device_type=self._device.type):
                yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)

    def apply(self, kept: Sequence[Unit], depth: int) -> None:
        """Keep these units gathered between forward and backward."""
        for unit in self._passes.units:
            unit.configure(reshard_after_forward=unit not in kept)
        self._passes.prefetch_depth = depth

    def run(self) -> None:
        """Forward and backward; drops the gradients."""
        self._step()
        for param in self._model.parameters():
            param.grad = None

    def order(self) -> list[Unit]:
        """The units as the last backward needed them, each once: the same on all ranks, or ValueError on all."""
        order = list(dict.fromkeys(self._passes.last_backward))
        numbers = {unit: number for number, unit in enumerate(self._passes.units)}
        names = ", ".join(f"{numbers[unit]} {unit.name}" for unit in order)
        same_on_all_ranks({"the order of units": names}, self._group, caller="tune")
        return order

    def peak(self) -> int:
        """The most live bytes of a step, of all ranks."""
        for unit in self._passes.units:
            unit.reshard()
        gc.collect()  # gathered memory of a model that is gone must not come back amid the step
        self._recycler.trim()
        self._others = self._pooled()
        self._passes.backward.slow_wire = True
        try:
            with self._meter.step():
                self.run()
        finally:
            self._passes.backward.slow_wire = False
        peak = torch.tensor(float(self._meter.peak or 0), dtype=torch.float64, device=self._device)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=self._group)
        return int(peak)
