"""AdamW with 8-bit moments over blocks: the update rule, apart from the optimizer that hosts it.

    runs        where parameters, gradients and codes are neighbours alike, without gaps
    stretches   consecutive blocks of one width: a matrix of tiles, over several parameters if they fit together
    units       stretches cut between bands of tiles to what the scratch holds

On CPU (and on CUDA without Triton) a unit is a list of torch ops; on CUDA all units are one Triton launch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from block_optim._base import Active
from block_optim._blocks import Grid, Stretch, local_scales, merged, scale_layout, stretches_of, wrap_scales
from block_optim._codec import map_of
from block_optim._launch import Launch, Row, Scalars, has_kernels, quantized_launches
from block_optim._params import Param
from block_optim._plan import Counts, Entry, StepPlan
from block_optim._quantized_ops import Place, Unit, UnitScratch
from block_optim._rounding import Rounder
from block_optim._runs import FlatSpace, Run, joint_runs, offset_of
from block_optim._scalars import Hyper, Rates
from layout_planner import parse_block
from ragged_shard import RaggedShard

CHUNK = {"cpu": 1 << 16, "cuda": 1 << 22}  # elements of a unit


@dataclass
class Codes(Entry):
    """An entry with its states as plain local tensors, and its blocks."""

    grid: Grid
    codes: tuple[torch.Tensor, torch.Tensor]
    scales: tuple[torch.Tensor, torch.Tensor]  # flat, over all parameters that were added together
    first_scale: int


class QuantizedRule:
    """The 8-bit moments and updates of the parameters that were given to `init_state`."""

    def __init__(self) -> None:
        self._entries: dict[torch.Tensor, Codes] = {}
        self._counts = Counts()
        self._plan: _Plan | None = None

    def init_state(self, group: dict[str, Any], params: Sequence[Param], state: Any) -> None:
        """Make `step`, codes (`exp_avg`, `exp_avg_sq`: uint8, param-shaped) and scales; enter them in ``state``."""
        for device in dict.fromkeys(p.device for p in params):
            self._init_on(device, group, [p for p in params if p.device == device], state)
        self._plan = None

    def _init_on(self, device: torch.device, group: dict[str, Any], params: list[Param], state: Any) -> None:
        block: Any = parse_block(group["block"])
        layouts = [scale_layout(p, block) for p in params]
        space = FlatSpace([p.local for p in params])
        codes = [space.views(space.zeros(torch.uint8, device)) for _ in range(2)]
        # Scales in the order of memory, so that those of neighbours are neighbours.
        counts = [local_scales(p, grid) for p, (grid, _) in zip(params, layouts, strict=True)]
        starts, end = [0] * len(params), 0
        for i in sorted(range(len(params)), key=lambda i: (space.offsets[i], counts[i])):
            starts[i], end = end, end + counts[i]
        scales = torch.zeros(end, device=device), torch.zeros(end, device=device)
        steps = self._counts.new(len(params), device if has_kernels(device) else "cpu")
        for i, (param, (grid, placements)) in enumerate(zip(params, layouts, strict=True)):
            shape = _local_shape(grid, placements, counts[i])
            wrapped = [
                wrap_scales(param, grid, placements, flat[starts[i] : starts[i] + counts[i]].view(shape))
                for flat in scales
            ]
            state[param.param] = {
                "step": steps[i],
                "exp_avg": param.wrap(codes[0][i]),
                "exp_avg_scale": wrapped[0],
                "exp_avg_sq": param.wrap(codes[1][i]),
                "exp_avg_sq_scale": wrapped[1],
            }
            pair = codes[0][i], codes[1][i]
            entry = Codes(param, group, steps[i], len(self._entries), grid, pair, scales, starts[i])
            self._entries[param.param] = entry

    def update(self, active: Active, found_inf: torch.Tensor | None = None) -> None:
        """One step of those parameters of this rule that have gradients; ``found_inf`` only where kernels take it."""
        plan = self._plan
        if plan is None or plan.version != active.version:
            plan = self._plan = _Plan(self._entries, self._counts, active)
        plan.step(active, found_inf)


def _local_shape(grid: Grid, placements: tuple[Any, ...], count: int) -> tuple[int, ...]:
    """Of this rank's part of the scales."""
    if not any(isinstance(p, RaggedShard) for p in placements):
        return grid.scale_shape
    width = grid.scale_shape[-1]
    return (count,) if len(grid.scale_shape) == 1 else (count // width, width)


@dataclass
class _Call:
    """A unit, the run in whose gradients its own lie, and its class."""

    unit: Unit
    run: Run
    stretch: Stretch
    kind: int
    kept: tuple[int, torch.Tensor] | None = None

    def grad(self, grads: list[torch.Tensor], keep: int) -> torch.Tensor:
        """The unit's gradients as (rows, columns)."""
        if self.kept is not None and self.kept[0] == keep:
            return self.kept[1]
        found = _matrix(grads[self.run.members[0]], self.stretch)
        self.kept = (keep, found) if keep else None
        return found


def _matrix(first: torch.Tensor, stretch: Stretch) -> torch.Tensor:
    """A stretch of a run, as (rows, columns); ``first`` is the tensor with which the run begins."""
    return first.as_strided(
        (stretch.rows, stretch.columns), (stretch.columns, 1), offset_of(first) + stretch.start
    )


class _Plan(StepPlan[Codes]):
    """Units of torch ops, or launches of a kernel, over stretches over runs."""

    def __init__(self, entries: dict[torch.Tensor, Codes], counts: Counts, active: Active) -> None:
        super().__init__(entries, counts, active)
        self.calls: list[_Call] = []
        self.launches: list[tuple[Scalars, list[Launch]]] = []

    def _run(
        self,
        grads: list[torch.Tensor],
        rates: list[tuple[Hyper, Rates]],
        keep: int,
        found_inf: torch.Tensor | None,
    ) -> None:
        if self.calls:
            counts = [round(float(self.entries[i].step)) for i in self.samples]
            for call in self.calls:
                call.unit.step(call.grad(grads, keep), *rates[call.kind], counts[call.kind])
        for scalars, launches in self.launches:
            scalars.update([hyper for hyper, _ in rates], [self.entries[i].step for i in self.samples])
            for launch in launches:
                launch(grads, scalars, found_inf)

    def _build(self, keys: list[tuple[int, int]], grads: list[torch.Tensor]) -> None:
        lists = [self.locals, grads, *([e.codes[i] for e in self.entries] for i in range(2))]
        own = [self._own(i, e) for i, e in enumerate(self.entries)]
        kinds = [(key, id(e.scales), mine) for key, e, mine in zip(keys, self.entries, own, strict=True)]
        found: dict[torch.device, list[tuple[Run, int, Stretch]]] = {}
        for run in joint_runs(lists, kinds, max_gap=0):
            first = run.members[0]
            kind = self.classes.index(keys[first])
            found.setdefault(self.locals[first].device, []).extend(
                (run, kind, s) for s in self._stretches(run)
            )
        self.calls, self.launches = [], []
        for device, stretches in found.items():
            if has_kernels(device):
                scalars = Scalars(device, len(self.classes))
                self.launches.append((scalars, self._launches(device, stretches, grads)))
            else:
                self.calls += self._units(device, stretches)

    def _launches(
        self, device: torch.device, stretches: list[tuple[Run, int, Stretch]], grads: list[torch.Tensor]
    ) -> list[Launch]:
        rows: dict[tuple[Any, ...], list[Row]] = {}
        for run, kind, part in stretches:
            i = run.members[0]
            entry, local, grad_dtype = self.entries[i], self.locals[i], grads[i].dtype
            group, start = entry.group, entry.param.start
            assert start is not None
            codes = [_matrix(c, part) for c in entry.codes]
            scales = [s[part.scale : part.scale + part.num_scales] for s in entry.scales]
            row = Row(
                _matrix(local, part), (*codes, *scales), run, part.start, part.rows, part.columns, part.num_scales,
                kind, grad_dtype, start + part.start, entry.param.name,
            )  # fmt: skip
            seed = group["seed"] if group["stochastic_rounding"] else None
            rows.setdefault((part.tile, group["state_map"], seed, local.dtype, grad_dtype), []).append(row)
        return quantized_launches(rows, lambda name: map_of(name, device))

    def _units(self, device: torch.device, stretches: list[tuple[Run, int, Stretch]]) -> list[_Call]:
        limit = CHUNK.get(device.type, CHUNK["cuda"])
        parts = [(run, kind, part) for run, kind, whole in stretches for part in _parts(whole, limit)]
        size = max(UnitScratch.size(part) for _, _, part in parts)
        scratch, rounder = UnitScratch(device, size), None
        if any(e.group["stochastic_rounding"] for e in self.entries):
            rounder = Rounder(size, device)
        return [_Call(self._unit(run, part, scratch, rounder), run, part, kind) for run, kind, part in parts]

    def _own(self, i: int, entry: Codes) -> Any:
        """What else keeps parameters out of one run: their format, and each bf16 one that is rounded by its name."""
        group = entry.group
        rounded = group["stochastic_rounding"] and entry.param.dtype == torch.bfloat16
        return (group["block"], group["state_map"], i if rounded else None)

    def _stretches(self, run: Run) -> list[Stretch]:
        base = offset_of(self.locals[run.members[0]])
        found = []
        for i in run.members:
            entry = self.entries[i]
            start = offset_of(self.locals[i]) - base
            found += stretches_of(entry.param, entry.grid, start, entry.first_scale)
        return merged(found)

    def _unit(self, run: Run, part: Stretch, scratch: UnitScratch, rounder: Rounder | None) -> Unit:
        i = run.members[0]
        entry, local = self.entries[i], self.locals[i]
        rounding = None
        if rounder is not None and entry.group["stochastic_rounding"] and local.dtype == torch.bfloat16:
            rounding = rounder, entry.group["seed"]
        height = -(-part.rows // part.tile[0])
        scales = [s[part.scale : part.scale + part.num_scales].view(height, -1) for s in entry.scales]
        codes = [_matrix(c, part) for c in entry.codes]
        start = entry.param.start
        assert start is not None
        place = Place(
            _matrix(local, part),
            (codes[0], codes[1]),
            (scales[0], scales[1]),
            entry.param.name,
            start + part.start,
        )
        return Unit(place, map_of(entry.group["state_map"], local.device), part, scratch, rounding)


def _parts(stretch: Stretch, limit: int) -> list[Stretch]:
    """A stretch in pieces of at most ``limit`` elements where its bands are that small."""
    bands = -(-stretch.rows // stretch.tile[0])
    many = max(1, limit // (stretch.tile[0] * -(-stretch.columns // stretch.tile[1]) * stretch.tile[1]))
    pieces = math.ceil(bands / many)
    return [stretch.bands(i * many, min(many, bands - i * many)) for i in range(pieces)]
