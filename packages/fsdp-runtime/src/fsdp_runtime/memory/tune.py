"""`tune`: which units stay gathered between forward and backward, and how many are gathered ahead, by measurement."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ragged_shard import is_cpu, same_on_all_ranks

from .._params.unit import Unit
from .._schedule.budget import WHATS, Choice, Cost, Mark, What, best, predictions
from .._schedule.model import member_of
from .._schedule.passes import Pass
from .meter import StepMeter
from .units import unit_memory

_TRIES = 4  # choices that are measured


@dataclass(frozen=True)
class Tuning:
    """What `tune` chose, the same on every rank.

    Attributes:
        kept: names of the units that stay gathered between forward and backward, as backward needs them.
        prefetch_depth: how many units are gathered ahead.
        peak: the most live bytes of a measured step with it, on the rank that had most.
        least: the same with every unit freed after forward and none gathered ahead.
        seconds: of forward and backward, predicted from recorded times.
        least_memory_seconds: the same for the step of `least`.
        curve: (peak bytes, seconds) of the fastest choices, each faster than those of fewer bytes; predicted.
    """

    kept: tuple[str, ...]
    prefetch_depth: int
    peak: int
    least: int
    seconds: float
    least_memory_seconds: float
    curve: tuple[tuple[int, float], ...]


class BudgetError(ValueError):
    """A memory budget that nothing fits.

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
    model: nn.Module, step: Callable[[], Any], *, memory_budget: int, group: dist.ProcessGroup | None = None
) -> Tuning:
    """Keep as many units gathered between forward and backward as a memory budget allows, and set the prefetch depth.

        tune(model, lambda: loss_of(model, batch).backward(), memory_budget=8 << 30)

    Instead of choosing `reshard_after_forward` for each unit by hand. Measures a lean step (every unit is freed after
    forward, none is gathered ahead), looks for the fastest choice that fits by what that showed, and measures it. The
    result is applied by `set_reshard_after_forward` and `set_prefetch_depth`, and changes no value: losses are bit for
    bit the same. Values of buffers and of torch's random generators are as before afterwards.

    The budget limits live bytes as the allocator sees them, with reductions as slow as they can be. On CPU every tensor
    of the process counts, those of other models too, and gathered buffers. Call this after the first optimizer step, or
    subtract what that step allocates. Batches that need more activations than this one need more than the budget.

    Before the first step ranks tell each other what they found: one all-gather of pickled objects (8 bytes a rank for
    the sizes, then under 100 bytes a rank, or as many as the longest error message takes). What one rank alone finds,
    such as a leftover gradient, is the same error on all. Then `step` is called 4 to 7 times. In addition to what that
    communicates, each unit is gathered twice, and 64 bytes a unit once and 8 bytes for each measured choice are
    all-reduced.

    Args:
        model: the root, sharded with `fully_shard`, each unit with a bool or None as `reshard_after_forward`.
        step: runs forward and backward as training will, on all ranks; gradients are dropped afterwards. No optimizer.
        memory_budget: bytes that may be live on each rank, the same number on all.
        group: the ranks that call this together. None: all ranks.

    Raises:
        BudgetError: the budget is below what a lean step takes. Nothing is changed.
        ValueError: ranks ran units in different orders, have different numbers of units or different budgets; on some
            rank the model is not a root, keeps parts among neighbors, prefetches by hand, has gradients, or has an
            optimizer in backward. The same on every rank, with the rank's name. Nothing is changed.
        RuntimeError: the order of units differs, and the first step's own comparison finds it.
    """
    passes = _agreed(model, memory_budget, group)
    trial = _Trial(model, passes, step, group)
    before = [(unit, unit.options.reshard_after_forward) for unit in passes.units], passes.prefetch_depth
    try:
        with trial.undone():
            return _chosen(trial, memory_budget)
    except BaseException:
        for unit, keep in before[0]:
            unit.configure(reshard_after_forward=keep)
        passes.prefetch_depth = before[1]
        raise


def _chosen(trial: "_Trial", budget: int) -> Tuning:
    trial.apply((), 0)
    trial.run()  # what is made once is there
    costs = trial.costs()
    marks, least = trial.marks()
    if least > budget:
        raise BudgetError(budget, least)
    found = predictions(marks, costs)
    lean = found[0]
    measured: dict[Choice, int] = {lean: least}
    error = least - lean.peak
    for _ in range(_TRIES):
        choice = best(found, budget - error)
        if choice is None or choice in measured:
            break
        trial.apply(choice.kept, choice.depth)
        measured[choice] = trial.peak()
        error = measured[choice] - choice.peak
    fitting = [choice for choice, peak in measured.items() if peak <= budget]
    chosen = best([lean, *fitting], max(choice.peak for choice in fitting)) or lean
    trial.apply(chosen.kept, chosen.depth)
    return Tuning(
        kept=tuple(trial.passes.units[number].name for number in chosen.kept),
        prefetch_depth=chosen.depth,
        peak=measured[chosen],
        least=least,
        seconds=chosen.seconds,
        least_memory_seconds=lean.seconds,
        curve=_curve(found),
    )


def _curve(choices: Sequence[Choice]) -> tuple[tuple[int, float], ...]:
    found: list[tuple[int, float]] = []
    for peak, seconds in sorted((choice.peak, choice.seconds) for choice in choices):
        if not found or seconds < found[-1][1]:
            found.append((peak, seconds))
    return tuple(found)


def _agreed(model: nn.Module, budget: int, group: dist.ProcessGroup | None) -> Pass:
    problem, units = None, 0
    try:
        passes = _checked(model, budget)
        units = len(passes.units)
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        problem = error
    values = {"the number of units": units, "memory_budget": budget}
    same_on_all_ranks(values, group, error=problem, caller="tune")
    return passes


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
        self, model: nn.Module, passes: Pass, step: Callable[[], Any], group: dist.ProcessGroup | None
    ) -> None:
        self.model, self.passes, self._step, self._group = model, passes, step, group
        recycler = passes.streams.recycler
        self._device = recycler.device
        self._meter = StepMeter(self._device, lambda: recycler.stats.lent_bytes + recycler.stats.parked_bytes)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Afterwards random generators and buffers are as before."""
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        devices = [] if is_cpu(self._device) else [self._device]
        try:
            with torch.random.fork_rng(devices, device_type=self._device.type):
                yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)

    def apply(self, kept: Sequence[int], depth: int) -> None:
        """Keep these units gathered between forward and backward."""
        for number, unit in enumerate(self.passes.units):
            unit.configure(reshard_after_forward=number not in kept)
        self.passes.prefetch_depth = depth

    def run(self) -> None:
        """Forward and backward, and drop what they leave."""
        self._step()
        for param in self.model.parameters():
            param.grad = None

    def peak(self) -> int:
        """The most live bytes of a step, of all ranks."""
        self._measure()
        return int(self._largest([float(self._meter.peak or 0)])[0])

    def _measure(self) -> None:
        for unit in self.passes.units:
            unit.reshard()
        self.passes.streams.recycler.trim()
        self.passes.backward.slow_wire = True
        try:
            with self._meter.step():
                self.run()
        finally:
            self.passes.backward.slow_wire = False

    def costs(self) -> list[Cost]:
        """What gathering each unit takes: the faster of two times, on the slowest rank."""
        taken: list[float] = []
        for unit in self.passes.units:
            times = []
            for _ in range(2):
                begun = self._now()
                unit.unshard()
                times.append(self._now() - begun)
                unit.reshard()
            taken.append(min(times))
        sizes = [sum(unit_memory(unit.modules[0]).gathered) for unit in self.passes.units]
        return [Cost(n, seconds) for n, seconds in zip(sizes, self._largest(taken), strict=True)]

    def marks(self) -> tuple[list[Mark], int]:
        """A lean step mark by mark, of all ranks together, and its peak."""
        watch = _Watch(self.passes.units, self._now, lambda: 0)
        self._watched(watch, self.run)
        seconds = watch.taken
        watch = _Watch(self.passes.units, lambda: 0.0, self._meter.lap)
        self._watched(watch, self._measure)
        for slot in seconds:
            watch.taken[slot] = seconds[slot]
        order, slots = list(watch.live), _slots(len(self.passes.units))
        place = {slot: float(order.index(slot)) if slot in watch.live else -1.0 for slot in slots}
        sent = [place[slot] for slot in slots] + [-place[slot] for slot in slots]
        sent += [float(watch.live.get(slot, 0)) for slot in slots]
        sent += [watch.taken.get(slot, 0.0) for slot in slots]
        got = self._largest([*sent, float(self._meter.peak or 0)])
        n = len(slots)
        if got[:n] != [-value for value in got[n : 2 * n]]:
            raise ValueError("tune: ranks ran the units in different orders; give all of them the same step")
        live, times = (dict(zip(slots, got[i * n : (i + 1) * n], strict=True)) for i in (2, 3))
        return [Mark(*slot, int(live[slot]), times[slot]) for slot in order], int(got[-1])

    def _watched(self, watch: "_Watch", run: Callable[[], None]) -> None:
        self.passes.observer = watch
        try:
            run()
        finally:
            self.passes.observer = None
        watch.close()

    def _now(self) -> float:
        if not is_cpu(self._device):
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def _largest(self, values: list[float]) -> list[float]:
        """Of each value the largest on any rank."""
        found = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        listed: list[float] = found.tolist()
        return listed


def _slots(units: int) -> list[tuple[What, int]]:
    return [(what, unit) for unit in range(units) for what in WHATS]


class _Watch:
    """The marks of a step: what is live and how long the model computes behind each. Repeated marks are one."""

    def __init__(self, units: Sequence[Unit], now: Callable[[], float], lap: Callable[[], int]) -> None:
        self._numbers = {unit: number for number, unit in enumerate(units)}
        self._now, self._lap = now, lap
        self._slot: tuple[What, int] | None = None
        self._begun = 0.0
        self.live: dict[tuple[What, int], int] = {}
        self.taken: dict[tuple[What, int], float] = {}

    def before(self) -> None:
        self.close()

    def after(self, what: What, unit: Unit) -> None:
        found, slot = self._lap(), (what, self._numbers[unit])
        frees = what in ("leave", "done") and self._slot is not None
        self._note(self._slot if frees else slot, found)
        self.live.setdefault(slot, 0)
        self._slot, self._begun = slot, self._now()

    def close(self) -> None:
        """The lap behind the last mark has ended."""
        self._note(self._slot, self._lap())
        if self._slot is not None:
            self.taken[self._slot] = self.taken.get(self._slot, 0.0) + self._now() - self._begun

    def _note(self, slot: tuple[What, int] | None, nbytes: int) -> None:
        if slot is not None:
            self.live[slot] = max(self.live.get(slot, 0), nbytes)
