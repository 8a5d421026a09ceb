"""Common part of AdamW's two rules: step counts, and a plan that is rebuilt only when something changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from block_optim.adam.launch import Launch, Scalars
from block_optim.adam.scalars import Hyper, Rates
from block_optim.core import _torch_compat as compat
from block_optim.core.gradients import StepGradients
from block_optim.core.params import Group, Param
from block_optim.core.runs import find_runs
from block_optim.core.snapshot import same_objects
from ragged_shard import is_cpu


class Counts:
    """Step counts of all parameters of a rule: fp32 tensors, counted together where they are neighbours in memory."""

    def __init__(self, steps: Sequence[torch.Tensor]) -> None:
        self._steps = list(steps)
        self._addresses = [step.data_ptr() for step in steps]
        runs = find_runs(steps, max_gap=0)
        self._order = [i for run in runs for i in run.members]
        self._buffers = [run.view(steps) for run in runs]
        self._known: list[float] = []
        self._versions: list[int] = []

    def are_of(self, steps: Sequence[torch.Tensor]) -> bool:
        """Whether these are the counts, at the same addresses."""
        return same_objects(list(steps), self._steps) and [s.data_ptr() for s in steps] == self._addresses

    @property
    def size(self) -> int:
        """Number of counts."""
        return len(self._steps)

    @property
    def on_device(self) -> bool:
        """Whether counts are on a device, and not read by the host. Skipped steps on the host: `BlockOptimizer`."""
        return any(not is_cpu(buffer.device) for buffer in self._buffers)

    def add(self, counters: list[torch.Tensor] | None, slots: list[int]) -> list[float]:
        """Count a step for some parameters (None: for all); their counts.

        Counts on a device are read if something else has written them. Otherwise the host counts along, skipped steps
        included, so that it does not wait; parameters with different counts are still distinguished.
        """
        on_device = self.on_device
        if not on_device or [compat.version_of(b) for b in self._buffers] != self._versions:
            counts = [count for buffer in self._buffers for count in buffer.tolist()]
            self._known = [count for _, count in sorted(zip(self._order, counts, strict=True))]
        for buffer in self._buffers if counters is None else counters:
            buffer.add_(1)
        counts = [self._known[slot] + 1 for slot in slots]
        if on_device:
            for slot, count in zip(slots, counts, strict=True):
                self._known[slot] = count
            self._versions = [compat.version_of(b) for b in self._buffers]
        return counts

    def roll_back(self, counters: list[torch.Tensor] | None, skipped: torch.Tensor) -> None:
        """Roll back the last step's count if ``skipped`` is 1."""
        for buffer in self._buffers if counters is None else counters:
            buffer.sub_(skipped)
        self._versions = [compat.version_of(b) for b in self._buffers]


@dataclass
class Entry:
    """A parameter of a rule, its step count and that count's number."""

    param: Param
    step: torch.Tensor
    slot: int

    @property
    def group(self) -> Group:
        """The parameter's options."""
        return self.param.group


EntryT = TypeVar("EntryT", bound=Entry)


@dataclass(frozen=True)
class Step:
    """Inputs of prepared calls in one step.

    Attributes:
        grads: the local gradients, in the plan's order.
        rates: the options and scalars of each class of parameters.
        keep: views of gradients may be kept while this stays the same, unless it is 0.
        found_inf: as in `StepGradients`.
    """

    grads: list[torch.Tensor]
    rates: list[tuple[Hyper, Rates]]
    keep: int
    found_inf: torch.Tensor | None


class StepPlan(Generic[EntryT]):
    """Prepared calls that update the parameters of a rule that have gradients, as long as their addresses stay.

    Parameters share a kernel call if they are of one class: of groups with equal options, and of equal step counts.
    A subclass prepares its calls in `_build` and makes them in `_run`.
    """

    def __init__(self, entries: dict[torch.Tensor, EntryT], counts: Counts, active: StepGradients) -> None:
        self.version = active.version
        self.positions = [i for i, p in enumerate(active.params) if p.tensor in entries]
        self.entries = [entries[active.params[i].tensor] for i in self.positions]
        self.locals = [active.locals[i] for i in self.positions]
        present = {id(e) for e in self.entries}
        self.idle = [e for e in entries.values() if id(e) not in present]
        self.groups = list({id(e.group): e.group for e in self.entries}.values())
        order = {id(group): i for i, group in enumerate(self.groups)}
        self.rounding = rounding_of(self.groups)
        self.group_of = [order[id(e.group)] for e in self.entries]
        self.counts = counts
        self.slots = [e.slot for e in self.entries]
        self.counters = None if len(self.entries) == counts.size else [e.step for e in self.entries]
        self.odd = self._odd_gradients(active)
        self.pattern: object = None
        self.classes: list[tuple[int, int]] = []
        self.launches: list[tuple[Scalars, list[Launch]]] = []

    def _build(self, keys: list[tuple[int, int]], grads: list[torch.Tensor]) -> None:
        """Prepare calls; ``self.classes.index(keys[i])`` is the class of entry i."""
        raise NotImplementedError

    def _run(self, step: Step) -> None:
        """Make the calls: here the launches of Triton kernels."""
        for scalars, launches in self.launches:
            scalars.update([hyper for hyper, _ in step.rates], [self.entries[i].step for i in self.samples])
            for launch in launches:
                launch(step.grads, scalars, step.found_inf)

    def step(self, active: StepGradients) -> None:
        """Count, and update."""
        if not self.entries:
            return
        grads = [active.grads[i] for i in self.positions]
        for i, buffer in self.odd:
            grads[i] = buffer.copy_(grads[i])
        hypers = [Hyper.of(group) for group in self.groups]
        counts = self.counts.add(self.counters, self.slots)
        self._prepare(counts, hypers, grads)
        rates = [(hypers[self.group_of[i]], hypers[self.group_of[i]].rates(counts[i])) for i in self.samples]
        self._run(Step(grads, rates, active.keeps, active.found_inf))
        if active.found_inf is not None and self.counts.on_device:
            self.counts.roll_back(self.counters, active.found_inf)

    def _odd_gradients(self, active: StepGradients) -> list[tuple[int, torch.Tensor]]:
        """Gradients whose memory is in another order than their parameter's, with a buffer in the right one."""
        odd = []
        for i, (position, local) in enumerate(zip(self.positions, self.locals, strict=True)):
            grad = active.grads[position]
            if grad.stride() != local.stride() and not (grad.is_contiguous() and local.is_contiguous()):
                buffer = torch.empty_strided(
                    local.shape, local.stride(), dtype=grad.dtype, device=grad.device
                )
                odd.append((i, buffer))
        return odd

    def _prepare(self, counts: list[float], hypers: list[Hyper], grads: list[torch.Tensor]) -> None:
        """Rebuild the calls when parameters can no longer share them, or newly can."""
        kinds = {h: i for i, h in reversed(list(enumerate(hypers)))}
        group_kinds = [kinds[h] for h in hypers]
        equal = counts.count(counts[0]) == len(counts)
        ages = {counts[0]: 0} if equal else {count: i for i, count in reversed(list(enumerate(counts)))}
        pattern = (group_kinds, None if equal else [ages[count] for count in counts])
        if pattern == self.pattern:
            return
        keys = [(group_kinds[g], ages[count]) for g, count in zip(self.group_of, counts, strict=True)]
        self.classes = list(dict.fromkeys(keys))
        self.samples = [keys.index(key) for key in self.classes]  # an entry of each class
        self._build(keys, grads)
        self.pattern = pattern


class Rule(Generic[EntryT]):
    """The moments and updates of some parameters.

    A subclass makes their states in `init_states`, finds them in `_entry`, and plans a step in `_plan_of`.
    """

    def __init__(self) -> None:
        self._entries: dict[torch.Tensor, EntryT] = {}
        self._counts = Counts([])
        self._plan: StepPlan[EntryT] | None = None

    def init_states(self, params: Sequence[Param], state: dict[torch.Tensor, Any]) -> None:
        """Make the states of parameters of one group and enter them into ``state``."""
        raise NotImplementedError

    def bind(self, params: Sequence[Param]) -> None:
        """Update these parameters, in the memory that their states have now, until this is called again."""
        self._entries = {p.tensor: self._entry(p, p.states, i) for i, p in enumerate(params)}
        steps = [entry.step for entry in self._entries.values()]
        if not self._counts.are_of(steps):
            self._counts = Counts(steps)
        self._plan = None

    def _entry(self, param: Param, state: Mapping[str, Any], slot: int) -> EntryT:
        """A parameter with its states; ``slot`` is the number of its step count."""
        raise NotImplementedError

    def _plan_of(self, active: StepGradients) -> StepPlan[EntryT]:
        raise NotImplementedError

    def update(self, active: StepGradients) -> None:
        """One step of those parameters of this rule that have gradients."""
        plan = self._plan
        if plan is None or plan.version != active.version or plan.rounding != rounding_of(plan.groups):
            plan = self._plan = self._plan_of(active)
        plan.step(active)


def rounding_of(groups: Sequence[Group]) -> list[tuple[bool, int]]:
    """The options of groups for which kernels are chosen."""
    return [(group["stochastic_rounding"], group["seed"]) for group in groups]
