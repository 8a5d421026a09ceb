"""AdamW over flat runs: the update rule, apart from the optimizer that hosts it.

    runs       where parameters, gradients and both moments are neighbours alike      a 1-D view each
    items      runs, cut to `CHUNK` elements                                          what the scratch can hold
    kernel     a fixed list of torch ops, or torch's fused kernel                     torch's numbers, bit by bit

Whichever kernel, an element's numbers do not depend on where its tensor is cut: the ops of the list are the same
everywhere, and torch's fused CPU kernel, whose code for the last few elements rounds differently, gets whole
vectors only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from block_optim._adamw_kernels import FusedKernel, Item, Kernel, ListKernel, Origin
from block_optim._base import Active
from block_optim._launch import WIDE_BLOCK, Launch, Row, Scalars, has_kernels, wide_launch
from block_optim._params import Param
from block_optim._plan import Counts, Entry, StepPlan
from block_optim._runs import FlatSpace, Run, gap_index, is_dense, joint_runs
from block_optim._scalars import Hyper, Rates


@dataclass
class Moments(Entry):
    """An entry with its moments as plain local tensors."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


class AdamWRule:
    """The moments and updates of the parameters that were given to `init_state`.

    Groups may have ``stochastic_rounding`` and ``seed``, for bf16 parameters.

    Args:
        fused: torch's fused kernel and its numbers, instead of the op list and those of torch's for-loop and foreach;
            or "cuda": only there, so that the host need not wait for `found_inf`.
    """

    def __init__(self, *, fused: bool | str = False) -> None:
        self._fused = fused
        self._entries: dict[torch.Tensor, Moments] = {}
        self._counts = Counts()
        self._plan: _Plan | None = None

    def init_state(self, group: dict[str, Any], params: Sequence[Param], state: Any) -> None:
        """Make `step`, `exp_avg` and `exp_avg_sq` (fp32; fp64 for fp64 parameters) and enter them into ``state``."""
        for device, dtype in dict.fromkeys((p.device, state_dtype(p)) for p in params):
            chosen = [p for p in params if (p.device, state_dtype(p)) == (device, dtype)]
            parts = [p.local for p in chosen]
            space = FlatSpace(parts)
            first, second = (space.views(space.zeros(dtype, device)) for _ in range(2))
            on_device = self._is_fused(device) and device.type != "cpu"
            steps = self._counts.new(len(chosen), device if on_device else "cpu")
            for param, m, v, step in zip(chosen, first, second, steps, strict=True):
                state[param.param] = {"step": step, "exp_avg": param.wrap(m), "exp_avg_sq": param.wrap(v)}
                self._entries[param.param] = Moments(param, group, step, len(self._entries), m, v)
        self._plan = None

    def _is_fused(self, device: torch.device) -> bool:
        return self._fused is True or self._fused == device.type

    def update(self, active: Active, found_inf: torch.Tensor | None = None) -> None:
        """One step of those parameters of this rule that have gradients."""
        plan = self._plan
        if plan is None or plan.version != active.version:
            plan = self._plan = _Plan(self._entries, self._counts, active, self._is_fused)
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


class _Plan(StepPlan[Moments]):
    """Kernels over runs, and the parameters' gap elements to put back."""

    def __init__(
        self,
        entries: dict[torch.Tensor, Moments],
        counts: Counts,
        active: Active,
        fused: Callable[[torch.device], bool],
    ) -> None:
        super().__init__(entries, counts, active)
        self.fused = fused
        self.kernels: list[Kernel] = []
        self.launches: list[tuple[Scalars, Launch]] = []
        self.gaps: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def _run(
        self,
        grads: list[torch.Tensor],
        rates: list[tuple[Hyper, Rates]],
        keep: int,
        found_inf: torch.Tensor | None,
    ) -> None:
        for run, index, buffer in self.gaps:
            torch.index_select(run, 0, index, out=buffer)
        for kernel in self.kernels:
            kernel(grads, rates, keep, found_inf)
        for scalars, launch in self.launches:
            scalars.update([hyper for hyper, _ in rates], [self.entries[i].step for i in self.samples])
            launch(grads, scalars, found_inf)
        for run, index, buffer in self.gaps:
            run.index_copy_(0, index, buffer)

    def _build(self, keys: list[tuple[int, int]], grads: list[torch.Tensor]) -> None:
        firsts, seconds = [e.exp_avg for e in self.entries], [e.exp_avg_sq for e in self.entries]
        origins = [_origin(e) for e in self.entries]
        kinds = list(zip(keys, origins, strict=True))
        # Parameters without gradients are no gaps: between two others they end a run, so their moments stay theirs.
        idle = [e.param.local for e in self.idle]
        lists = [
            [*self.locals, *idle],
            [*grads, *idle],
            [*firsts, *(e.exp_avg for e in self.idle)],
            [*seconds, *(e.exp_avg_sq for e in self.idle)],
        ]
        found = joint_runs(lists, [*kinds, *(("idle", i) for i in range(len(idle)))])
        runs = [run for run in found if run.members[0] < len(self.entries)]
        batches: dict[Any, list[Item]] = {}
        for run in runs:
            first = run.members[0]
            part, origin = self.locals[first], origins[first]
            seed = None if origin is None else origin.seed
            kind, counter = self.classes.index(keys[first]), self.entries[first].step
            item = Item(run, kind, self.locals, firsts, seconds, counter)
            item.origin = origin
            batches.setdefault((part.device, part.dtype, grads[first].dtype, seed), []).append(item)
        self.kernels, self.launches = [], []
        for (device, dtype, grad_dtype, seed), items in batches.items():
            fused = self.fused(device)
            narrow = dtype != torch.float32 or grad_dtype != torch.float32
            if fused and narrow and items[0].first.dtype == torch.float32 and has_kernels(device):
                scalars = Scalars(device, len(self.classes))
                self.launches.append((scalars, wide_launch([_row(i, grad_dtype) for i in items], seed)))
            else:
                self.kernels += (FusedKernel if fused else ListKernel).over(items, grad_dtype)
        self.gaps = [gap for run in runs if (gap := self._gap(run)) is not None]

    def _gap(self, run: Run) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        part = self.locals[run.members[0]]
        index = gap_index(run, part.device)
        if index is None:
            return None
        return run.view(self.locals), index, torch.empty(len(index), dtype=part.dtype, device=part.device)


_NOWHERE = Origin("", 0, 0)


def _origin(entry: Moments) -> Origin | None:
    """What the random bits of a stochastically rounded parameter depend on; None for others."""
    if not entry.group.get("stochastic_rounding") or entry.param.dtype != torch.bfloat16:
        return None
    assert entry.param.start is not None
    return Origin(entry.param.name, entry.group["seed"], entry.param.start)


def _row(item: Item, grad_dtype: torch.dtype) -> Row:
    numel = item.numel
    origin = item.origin or _NOWHERE
    views = [t.as_strided((numel,), (1,)) for t in (item.param, item.first, item.second)]
    programs = -(-numel // WIDE_BLOCK)
    return Row(
        views[0],
        tuple(views[1:]),
        item.run,
        0,
        1,
        numel,
        programs,
        item.kind,
        grad_dtype,
        origin.element,
        origin.name,
    )
