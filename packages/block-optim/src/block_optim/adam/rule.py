"""AdamW over flat runs: the update rule, apart from the optimizer that hosts it.

    runs       where parameters, gradients and both moments are neighbours            a 1-D view each
    slices     runs, cut to `CHUNK` elements                                          what the scratch can hold
    kernel     a fixed list of torch ops, or torch's fused kernel                     torch's numbers, bit by bit

Whichever kernel, an element's numbers do not depend on where its tensor is cut: the ops of the list are the same
everywhere, and torch's fused CPU kernel, whose code for the last few elements rounds differently, gets whole
vectors only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from block_optim.adam.kernels_cpu import FusedKernel, Kernel, ListKernel, RunSlice
from block_optim.adam.launch import Row, Scalars, launches_of
from block_optim.adam.plan import Counts, Entry, Rule, Step, StepPlan
from block_optim.adam.variants import VECTOR, Types, wide_variant
from block_optim.core._torch_compat import local_of
from block_optim.core.gradients import StepGradients
from block_optim.core.params import Param
from block_optim.core.precision import Origin, origin_of
from block_optim.core.runs import FlatSpace, Run, gap_index, joint_runs
from ragged_shard import CPU, has_triton, is_cpu


@dataclass
class Moments(Entry):
    """An entry with its moments as plain local tensors."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


class AdamWRule(Rule[Moments]):
    """States `step`, `exp_avg` and `exp_avg_sq` (fp32; fp64 for fp64 parameters).

    Groups may have ``stochastic_rounding`` and ``seed``, for bf16 parameters.

    Args:
        fused: torch's fused kernel and its numbers, instead of the op list and those of torch's for-loop and foreach;
            or the devices on which.
    """

    def __init__(self, *, fused: bool | Callable[[torch.device], bool] = False) -> None:
        super().__init__()
        self._fused = fused

    @override
    def init_states(self, params: Sequence[Param], state: dict[torch.Tensor, Any]) -> None:
        """Make the moments in one flat buffer for each device and dtype."""
        for device, dtype in dict.fromkeys((p.device, _state_dtype(p)) for p in params):
            chosen = [p for p in params if (p.device, _state_dtype(p)) == (device, dtype)]
            space = FlatSpace([p.local for p in chosen])
            first, second = (space.views(space.zeros(dtype, device)) for _ in range(2))
            on_device = self._is_fused(device) and not is_cpu(device)
            steps = torch.zeros(len(chosen), dtype=torch.float32, device=device if on_device else CPU)
            for param, m, v, step in zip(chosen, first, second, steps.unbind(), strict=True):
                state[param.tensor] = {"step": step, "exp_avg": param.wrap(m), "exp_avg_sq": param.wrap(v)}

    def _entry(self, param: Param, state: Mapping[str, Any], slot: int) -> Moments:
        moments = (local_of(state[name]) for name in ("exp_avg", "exp_avg_sq"))
        return Moments(param, state["step"], slot, *moments)

    def _is_fused(self, device: torch.device) -> bool:
        return self._fused(device) if callable(self._fused) else self._fused

    def _plan_of(self, active: StepGradients) -> "_Plan":
        return _Plan(self._entries, self._counts, active, self._is_fused)


def _state_dtype(param: Param) -> torch.dtype:
    """Dtype of a parameter's moments: as wide as the parameter, at least fp32."""
    return torch.promote_types(param.dtype, torch.float32)


class _Plan(StepPlan[Moments]):
    """Kernels over runs, and the parameters' gap elements to put back."""

    def __init__(
        self,
        entries: dict[torch.Tensor, Moments],
        counts: Counts,
        active: StepGradients,
        fused: Callable[[torch.device], bool],
    ) -> None:
        super().__init__(entries, counts, active)
        self.fused = fused
        self.kernels: list[Kernel] = []
        self.gaps: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def _run(self, step: Step) -> None:
        for run, index, buffer in self.gaps:
            torch.index_select(run, 0, index, out=buffer)
        for kernel in self.kernels:
            kernel(step)
        super()._run(step)
        for run, index, buffer in self.gaps:
            run.index_copy_(0, index, buffer)

    def _build(self, keys: list[tuple[int, int]], grads: list[torch.Tensor]) -> None:
        lists = (self.locals, [e.exp_avg for e in self.entries], [e.exp_avg_sq for e in self.entries])
        origins = [origin_of(e.param) for e in self.entries]
        runs = self._runs(list(zip(keys, origins, strict=True)), grads)
        batches: dict[Any, list[RunSlice]] = {}
        for run in runs:
            i = run.members[0]
            local, origin = self.locals[i], origins[i]
            seed = None if origin is None else origin.seed
            result = RunSlice(run, self.classes.index(keys[i]), lists, self.entries[i].step, origin)
            batches.setdefault((local.device, local.dtype, grads[i].dtype, seed), []).append(result)
        self.kernels, self.launches = [], []
        for (device, dtype, grad_dtype, seed), slices in batches.items():
            fused = self.fused(device)
            narrow = dtype != torch.float32 or grad_dtype != torch.float32
            if fused and narrow and slices[0].first.dtype == torch.float32 and has_triton(device):
                rows = [row for s in slices for row in _rows(s, grad_dtype)]
                variant = partial(wide_variant, Types(dtype, grad_dtype, seed is not None))
                launches = launches_of(rows, seed, variant)
                self.launches.append((Scalars(device, len(self.classes)), launches))
            else:
                self.kernels += (FusedKernel if fused else ListKernel).over(slices, grad_dtype)
        self.gaps = [gap for run in runs if (gap := self._gap(run)) is not None]

    def _runs(self, kinds: list[Any], grads: list[torch.Tensor]) -> list[Run]:
        """The runs of parameters, gradients and moments. A parameter without gradient is not a gap: it ends a run."""
        idle, everyone = [e.param.local for e in self.idle], [*self.entries, *self.idle]
        lists = [
            [*self.locals, *idle],
            [*grads, *idle],
            [e.exp_avg for e in everyone],
            [e.exp_avg_sq for e in everyone],
        ]
        result = joint_runs(lists, [*kinds, *(("idle", i) for i in range(len(idle)))])
        return [run for run in result if run.members[0] < len(self.entries)]

    def _gap(self, run: Run) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        local = self.locals[run.members[0]]
        index = gap_index(run, local.device)
        if index is None:
            return None
        return run.view(self.locals), index, torch.empty(len(index), dtype=local.dtype, device=local.device)


_NOWHERE = Origin("", 0, 0)


def _rows(s: RunSlice, grad_dtype: torch.dtype) -> list[Row]:
    """A row for as many whole vectors as there are, and one for what is left."""
    origin = s.origin or _NOWHERE
    result = []
    whole = s.numel - s.numel % VECTOR
    for start, stop in ((0, whole), (whole, s.numel)):
        if start == stop:
            continue
        param, *states = (t.as_strided((s.numel,), (1,))[start:stop] for t in (s.param, s.first, s.second))
        count = stop - start
        row = Row(
            param, tuple(states), s.run, start, 1, count, count, count, s.kind, grad_dtype,
            origin.element + start, origin.name,
        )  # fmt: skip
        result.append(row)
    return result
