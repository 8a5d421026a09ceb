"""What AdamW's rules have in common: step counts, and a plan that is worked out again only when something changed."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from block_optim import _torch_compat as compat
from block_optim._base import Active
from block_optim._params import Param
from block_optim._scalars import Hyper, Rates


class Counts:
    """The step counts of all parameters of a rule: fp32, in one small buffer for each device and group."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []
        self._known: list[float] = []
        self._versions: list[int] = []

    def new(self, number: int, device: torch.device | str = "cpu") -> tuple[torch.Tensor, ...]:
        """Counts of more parameters, 0-d each."""
        self.buffers.append(torch.zeros(number, device=device))
        return self.buffers[-1].unbind()

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


@dataclass
class Entry:
    """A parameter of a rule: its group, its step count and that count's number."""

    param: Param
    group: dict[str, Any]
    step: torch.Tensor
    slot: int


EntryT = TypeVar("EntryT", bound=Entry)


class StepPlan(Generic[EntryT]):
    """How the parameters of a rule that have gradients are updated, for as long as their addresses stay.

    Parameters share a kernel call if they are of one class: of groups with equal options, and of equal step counts.
    A subclass builds its calls in `_build` and makes them in `_run`.
    """

    def __init__(self, entries: dict[torch.Tensor, EntryT], counts: Counts, active: Active) -> None:
        self.version = active.version
        self.positions = [i for i, p in enumerate(active.params) if p.param in entries]
        self.entries = [entries[active.params[i].param] for i in self.positions]
        self.locals = [active.locals[i] for i in self.positions]
        present = {id(e) for e in self.entries}
        self.idle = [e for e in entries.values() if id(e) not in present]
        self.groups = list({id(e.group): e.group for e in self.entries}.values())
        order = {id(group): i for i, group in enumerate(self.groups)}
        self.group_of = [order[id(e.group)] for e in self.entries]
        self.counts = counts
        self.slots = [e.slot for e in self.entries]
        self.counters = None if len(self.entries) == len(entries) else [e.step for e in self.entries]
        self.odd = self._odd_gradients(active)
        self.pattern: Any = None
        self.classes: list[tuple[int, int]] = []

    def _build(self, keys: list[tuple[int, int]], grads: list[torch.Tensor]) -> None:
        """Prepare calls; ``self.classes.index(keys[i])`` is the class of entry i."""
        raise NotImplementedError

    def _run(
        self,
        grads: list[torch.Tensor],
        rates: list[tuple[Hyper, Rates]],
        keep: int,
        found_inf: torch.Tensor | None,
    ) -> None:
        """Make the calls; ``rates`` has one entry for each class. Views of gradients may be kept while ``keep``
        stays, unless it is 0.
        """
        raise NotImplementedError

    def step(self, active: Active, found_inf: torch.Tensor | None) -> None:
        """Count, and update."""
        if not self.entries:
            return
        grads = [active.grads[i] for i in self.positions]
        for i, buffer in self.odd:
            grads[i] = buffer.copy_(grads[i])
        counts = self.counts.add(self.counters, self.slots)
        hypers = [Hyper.of(group) for group in self.groups]
        self._prepare(counts, hypers, grads)
        rates = [(hypers[self.group_of[i]], hypers[self.group_of[i]].rates(counts[i])) for i in self.samples]
        self._run(grads, rates, active.keeps, found_inf)
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
        """Build anew where options or counts that were equal no longer are, or have become so."""
        kinds = {h: i for i, h in reversed(list(enumerate(hypers)))}
        group_kinds = [kinds[h] for h in hypers]
        ages = {count: i for i, count in reversed(list(enumerate(counts)))}
        pattern = (group_kinds, [ages[count] for count in counts] if len(ages) > 1 else None)
        if pattern == self.pattern:
            return
        keys = [(group_kinds[g], ages[count]) for g, count in zip(self.group_of, counts, strict=True)]
        self.classes = list(dict.fromkeys(keys))
        self.samples = [keys.index(key) for key in self.classes]  # an entry of each class
        self._build(keys, grads)
        self.pattern = pattern
