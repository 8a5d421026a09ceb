"""AdamW over flat runs: the update rule, apart from the optimizer that hosts it.

    runs       where parameters, gradients and both moments are neighbours alike      a 1-D view each
    items      runs, cut to `CHUNK` elements                                          what the scratch can hold
    kernel     a fixed list of torch ops, or torch's fused kernel                     torch's numbers, bit by bit

Whichever kernel, an element's numbers do not depend on where its tensor is cut: the ops of the list are the same
everywhere, and torch's fused CPU kernel, whose code for the last few elements rounds differently, gets whole
vectors only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from block_optim import _torch_compat as compat
from block_optim._adamw_kernels import FusedKernel, Item, Kernel, ListKernel
from block_optim._base import Active
from block_optim._params import Param
from block_optim._runs import FlatSpace, Run, gap_index, is_dense, joint_runs
from block_optim._scalars import Hyper


@dataclass
class Entry:
    """A parameter of this rule: its group, and its states as plain local tensors."""

    param: Param
    group: dict[str, Any]
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: torch.Tensor
    slot: int  # among the counts of all steps of the rule


class AdamWRule:
    """The moments and updates of the parameters that were given to `init_state`.

    Args:
        fused: torch's fused kernel and its numbers, instead of the op list and those of torch's for-loop and foreach.
    """

    def __init__(self, *, fused: bool = False) -> None:
        self._fused = fused
        self._entries: dict[torch.Tensor, Entry] = {}
        self._counts = _Counts()
        self._plan: _Plan | None = None

    def init_state(self, group: dict[str, Any], params: Sequence[Param], state: Any) -> None:
        """Make `step`, `exp_avg` and `exp_avg_sq` (fp32; fp64 for fp64 parameters) and enter them into ``state``."""
        for device, dtype in dict.fromkeys((p.device, state_dtype(p)) for p in params):
            chosen = [p for p in params if (p.device, state_dtype(p)) == (device, dtype)]
            parts = [p.local for p in chosen]
            space = FlatSpace(parts)
            first, second = (space.views(space.zeros(dtype, device)) for _ in range(2))
            on_device = self._fused and device.type != "cpu"
            steps = torch.zeros(len(chosen), device=device if on_device else "cpu")
            self._counts.buffers.append(steps)
            for param, m, v, step in zip(chosen, first, second, steps.unbind(), strict=True):
                state[param.param] = {"step": step, "exp_avg": param.wrap(m), "exp_avg_sq": param.wrap(v)}
                self._entries[param.param] = Entry(param, group, m, v, step, len(self._entries))
        self._plan = None

    def update(self, active: Active, found_inf: torch.Tensor | None = None) -> None:
        """One step of those parameters of this rule that have gradients."""
        plan = self._plan
        if plan is None or plan.version != active.version:
            plan = self._plan = _Plan(self._entries, self._counts, active, self._fused)
        plan.step(active, found_inf)


def state_dtype(param: Param) -> torch.dtype:
    """Of a parameter's moments: as wide as itself, at least fp32."""
    return torch.promote_types(param.dtype, torch.float32)


def check_dense(param: Param) -> None:
    """Raise unless the local part fills its memory without holes."""
    if not is_dense(param.local):
        raise ValueError(
            f"{param.name}: its memory has holes (shape {tuple(param.local.shape)}, stride {param.local.stride()}); "
            "optimize a contiguous tensor"
        )


class _Counts:
    """The step counts of all parameters of a rule, in one small buffer for each call of `init_state`."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []
        self._known: list[float] = []
        self._versions: list[int] = []

    def add(self, counters: list[torch.Tensor] | None, slots: list[int]) -> list[float]:
        """Count a step for some parameters (None: for all); their counts.

        Counts on a device are read when something else has written them; between that they are added up here too,
        those of skipped steps included, so that the host need not wait: parameters that differ are still told apart.
        """
        on_device = any(buffer.device.type != "cpu" for buffer in self.buffers)
        if not on_device or [compat.version_of(b) for b in self.buffers] != self._versions:
            self._known = [count for buffer in self.buffers for count in buffer.tolist()]
        for buffer in self.buffers if counters is None else counters:
            buffer.add_(1)
        for slot in slots:
            self._known[slot] += 1
        self._versions = [compat.version_of(b) for b in self.buffers]
        return [self._known[slot] for slot in slots]

    def take_back(self, counters: list[torch.Tensor] | None, skipped: torch.Tensor) -> None:
        """Do not count the step after all where ``skipped`` is 1."""
        for buffer in self.buffers if counters is None else counters:
            buffer.sub_(skipped)
        self._versions = [compat.version_of(b) for b in self.buffers]


class _Plan:
    """What an update does, worked out once for each set of gradients."""

    def __init__(
        self, entries: dict[torch.Tensor, Entry], counts: _Counts, active: Active, fused: bool
    ) -> None:
        self.version = active.version
        self.fused = fused
        self.positions = [i for i, p in enumerate(active.params) if p.param in entries]
        self.entries = [entries[active.params[i].param] for i in self.positions]
        self.locals = [active.locals[i] for i in self.positions]
        self.groups = list({id(e.group): e.group for e in self.entries}.values())
        self.group_of = [next(i for i, g in enumerate(self.groups) if g is e.group) for e in self.entries]
        self.counts = counts
        self.slots = [e.slot for e in self.entries]
        self.counters = None if len(self.entries) == len(entries) else [e.step for e in self.entries]
        self.odd = self._odd_gradients(active)
        self.kernels: list[Kernel] = []
        self.gaps: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.pattern: Any = None
        self.classes: list[tuple[int, int]] = []

    def step(self, active: Active, found_inf: torch.Tensor | None) -> None:
        if not self.entries:
            return
        grads = [active.grads[i] for i in self.positions]
        for i, buffer in self.odd:
            grads[i] = buffer.copy_(grads[i])
        counts = self.counts.add(self.counters, self.slots)
        hypers = [Hyper.of(group) for group in self.groups]
        self._prepare(counts, hypers, grads)
        rates = [(hypers[g], hypers[g].rates(counts[i])) for g, i in self.classes]
        for run, index, buffer in self.gaps:
            torch.index_select(run, 0, index, out=buffer)
        for kernel in self.kernels:
            kernel(grads, rates, active.keeps, found_inf)
        for run, index, buffer in self.gaps:
            run.index_copy_(0, index, buffer)
        if found_inf is not None:
            self.counts.take_back(self.counters, found_inf)

    def _odd_gradients(self, active: Active) -> list[tuple[int, torch.Tensor]]:
        """Gradients whose memory is in another order than their parameter's, with a buffer in the right one."""
        odd = []
        for i, (position, part) in enumerate(zip(self.positions, self.locals, strict=True)):
            grad = active.grads[position]
            if grad.stride() != part.stride() and not (grad.is_contiguous() and part.is_contiguous()):
                buffer = torch.empty_strided(part.shape, part.stride(), dtype=grad.dtype, device=grad.device)
                odd.append((i, buffer))
        return odd

    def _prepare(self, counts: list[float], hypers: list[Hyper], grads: list[torch.Tensor]) -> None:
        """Plan anew where groups or counts that were equal no longer are, or now have become so."""
        kinds = {h: i for i, h in reversed(list(enumerate(hypers)))}
        group_kinds = [kinds[h] for h in hypers]
        ages = {count: i for i, count in reversed(list(enumerate(counts)))}
        pattern = (group_kinds, [ages[count] for count in counts] if len(ages) > 1 else None)
        if pattern == self.pattern:
            return
        self.pattern = pattern
        keys = [(group_kinds[g], ages[count]) for g, count in zip(self.group_of, counts, strict=True)]
        self.classes = list(dict.fromkeys(keys))
        firsts, seconds = [e.exp_avg for e in self.entries], [e.exp_avg_sq for e in self.entries]
        runs = joint_runs([self.locals, grads, firsts, seconds], keys)
        kernel = FusedKernel if self.fused else ListKernel
        batches: dict[Any, list[Item]] = {}
        for run in runs:
            first = run.members[0]
            place = (self.locals[first].device, self.locals[first].dtype, grads[first].dtype)
            item = Item(
                run, self.classes.index(keys[first]), self.locals, firsts, seconds, self.entries[first].step
            )
            batches.setdefault(place, []).append(item)
        self.kernels = [made for place, items in batches.items() for made in kernel.over(items, place[2])]
        self.gaps = [gap for run in runs if (gap := self._gap(run)) is not None]

    def _gap(self, run: Run) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        part = self.locals[run.members[0]]
        index = gap_index(run, part.device)
        if index is None:
            return None
        return run.view(self.locals), index, torch.empty(len(index), dtype=part.dtype, device=part.device)
