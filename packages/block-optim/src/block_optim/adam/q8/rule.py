"""AdamW with 8-bit moments over blocks: the update rule, apart from the optimizer that hosts it.

    runs        where parameters, gradients and codes are neighbours in the same order, without gaps
    stretches   consecutive blocks of one width: a matrix of tiles, over several parameters if they fit together
    tile steps  stretches cut between bands of tiles to what the scratch holds

On CPU (and on CUDA without Triton) a tile step is a list of torch ops; on CUDA all stretches are one Triton launch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from block_optim.adam.launch import Launch, Row, Scalars, launches_of
from block_optim.adam.plan import Counts, Entry, Rule, Step, StepPlan
from block_optim.adam.q8.ops import BUFFERS, TileStep, TileTensors
from block_optim.adam.q8.variants import quantized_variant
from block_optim.adam.variants import Types
from block_optim.core._torch_compat import local_of
from block_optim.core.device import per_device
from block_optim.core.gradients import StepGradients
from block_optim.core.grid import ScaleLayout, block_for, scale_layout
from block_optim.core.params import Param
from block_optim.core.rounding import Rounder
from block_optim.core.runs import FlatSpace, Run, joint_runs, offset_of
from block_optim.core.skip import unless
from block_optim.core.tiles import Stretch, TileScratch, merged, stretches_of
from ragged_shard import CPU, has_triton

CPU_CHUNK, ACCELERATOR_CHUNK = 1 << 17, 1 << 22  # elements of a tile step


@dataclass
class Codes(Entry):
    """An entry with its states as plain local tensors, and its blocks."""

    layout: ScaleLayout
    codes: tuple[torch.Tensor, torch.Tensor]
    scales: tuple[torch.Tensor, torch.Tensor]  # flat

    @property
    def scale_memory(self) -> tuple[int, int, int]:
        """Equal for parameters whose scales may be neighbours: both storages, and the difference of their offsets."""
        first, second = self.scales
        storages = first.untyped_storage().data_ptr(), second.untyped_storage().data_ptr()
        return *storages, offset_of(second) - offset_of(first)


class QuantizedRule(Rule[Codes]):
    """States `step`, codes (`exp_avg`, `exp_avg_sq`: uint8, param-shaped), and scales (`.._scale`)."""

    @override
    def init_states(self, params: Sequence[Param], state: dict[torch.Tensor, Any]) -> None:
        """Make codes and scales in flat buffers for each device."""
        for device in dict.fromkeys(p.device for p in params):
            self._init_on(device, [p for p in params if p.device == device], state)

    def _init_on(self, device: torch.device, params: list[Param], state: dict[torch.Tensor, Any]) -> None:
        layouts = [scale_layout(p, block_for(p, p.group["block"])) for p in params]
        space = FlatSpace([p.local for p in params])
        codes = [space.views(space.zeros(torch.uint8, device)) for _ in range(2)]
        # Scales in the order of memory, so that those of neighbours are neighbours.
        counts = [layout.num_scales for layout in layouts]
        starts, end = [0] * len(params), 0
        for i in sorted(range(len(params)), key=lambda i: (space.offsets[i], counts[i])):
            starts[i], end = end, end + counts[i]
        first, second = (torch.zeros(end, dtype=torch.float32, device=device) for _ in range(2))
        steps = torch.zeros(
            len(params), dtype=torch.float32, device=device if has_triton(device) else CPU
        ).unbind()
        for i, (param, layout) in enumerate(zip(params, layouts, strict=True)):
            stop = starts[i] + counts[i]
            wrapped = [layout.wrap(param, flat[starts[i] : stop]) for flat in (first, second)]
            state[param.tensor] = {
                "step": steps[i],
                "exp_avg": param.wrap(codes[0][i]),
                "exp_avg_scale": wrapped[0],
                "exp_avg_sq": param.wrap(codes[1][i]),
                "exp_avg_sq_scale": wrapped[1],
            }

    def _entry(self, param: Param, state: Mapping[str, Any], slot: int) -> Codes:
        known = self._entries.get(param.tensor)
        if known is not None and known.param is param:  # else it was put back, perhaps with other blocks
            layout = known.layout
        else:
            layout = scale_layout(param, block_for(param, param.group["block"]))
        codes = [local_of(state[name]) for name in ("exp_avg", "exp_avg_sq")]
        scales = [local_of(state[f"{name}_scale"]).view(-1) for name in ("exp_avg", "exp_avg_sq")]
        return Codes(
            param,
            state["step"],
            slot,
            layout,
            (codes[0], codes[1]),
            (scales[0], scales[1]),
        )

    def _plan_of(self, active: StepGradients) -> "_Plan":
        return _Plan(self._entries, self._counts, active)


@dataclass
class _Call:
    """A tile step, the stretch of the run from which its gradients are taken, and its class."""

    tiles: TileStep
    run: Run
    stretch: Stretch
    kind: int
    kept: tuple[int, torch.Tensor] | None = None

    def grad(self, step: Step) -> torch.Tensor:
        """The gradients as (rows, columns)."""
        if self.kept is not None and self.kept[0] == step.keep:
            return self.kept[1]
        result = self.stretch.matrix(step.grads[self.run.members[0]])
        self.kept = (step.keep, result) if step.keep else None
        return result


class _Plan(StepPlan[Codes]):
    """Tile steps, or launches of a kernel, over stretches over runs."""

    def __init__(self, entries: dict[torch.Tensor, Codes], counts: Counts, active: StepGradients) -> None:
        super().__init__(entries, counts, active)
        self.calls: list[_Call] = []

    def _run(self, step: Step) -> None:
        if self.calls:
            counts = [round(float(self.entries[i].step)) for i in self.samples]
            for call in self.calls:
                tensors = call.tiles.tensors
                with unless(step.found_inf, [tensors.param, *tensors.codes, *tensors.scales]):
                    call.tiles(call.grad(step), *step.rates[call.kind], counts[call.kind])
        super()._run(step)

    def _build(self, keys: list[tuple[int, int]], grads: list[torch.Tensor]) -> None:
        lists = [self.locals, grads, *([e.codes[i] for e in self.entries] for i in range(2))]
        own = [self._own(i, e) for i, e in enumerate(self.entries)]
        kinds = [
            (key, e.scale_memory, format_key)
            for key, e, format_key in zip(keys, self.entries, own, strict=True)
        ]
        result: dict[torch.device, list[tuple[Run, int, Stretch]]] = {}
        for run in joint_runs(lists, kinds, max_gap=0):
            first = run.members[0]
            kind = self.classes.index(keys[first])
            result.setdefault(self.locals[first].device, []).extend(
                (run, kind, s) for s in self._stretches(run)
            )
        self.calls, self.launches = [], []
        for device, stretches in result.items():
            if has_triton(device):
                scalars = Scalars(device, len(self.classes))
                self.launches.append((scalars, self._launches(stretches, grads)))
            else:
                self.calls += self._tile_steps(device, stretches)

    def _own(self, i: int, entry: Codes) -> tuple[str, int | None]:
        """Keys that must match for parameters to share a run: block format, and the rounding of bf16 parameters."""
        return str(entry.layout.grid.block), None if self._seed(i) is None else i

    def _seed(self, i: int) -> int | None:
        """Rounding seed of the entry's parameter, or None for round-to-nearest."""
        group = self.entries[i].group
        rounded = group["stochastic_rounding"] and self.locals[i].dtype == torch.bfloat16
        return group["seed"] if rounded else None

    def _stretches(self, run: Run) -> list[Stretch]:
        base = offset_of(self.locals[run.members[0]])
        stretches = []
        for i in run.members:
            entry = self.entries[i]
            start = offset_of(self.locals[i]) - base
            stretches += stretches_of(entry.layout, start, offset_of(entry.scales[0]))
        return merged(stretches)

    def _tensors(self, i: int, stretch: Stretch) -> TileTensors:
        """The memory of a stretch of the run that begins with entry i."""
        entry = self.entries[i]
        bands = stretch.grid[0]
        scales = []
        for flat in entry.scales:
            offset = stretch.scale + offset_of(flat) - offset_of(entry.scales[0])
            scales.append(flat.as_strided((stretch.num_scales,), (1,), offset).view(bands, -1))
        codes = [stretch.matrix(c) for c in entry.codes]
        return TileTensors(
            stretch.matrix(self.locals[i]),
            (codes[0], codes[1]),
            (scales[0], scales[1]),
            entry.param.name,
            (entry.param.start or 0) + stretch.start,  # only stochastic rounding asks, of what is one run
        )

    def _launches(self, stretches: list[tuple[Run, int, Stretch]], grads: list[torch.Tensor]) -> list[Launch]:
        rows: dict[tuple[Any, ...], list[Row]] = {}
        for run, kind, s in stretches:
            i = run.members[0]
            group, t = self.entries[i].group, self._tensors(i, s)
            dtypes = (self.locals[i].dtype, grads[i].dtype)
            row = Row(
                t.param, (*t.codes, *t.scales), run, s.start, s.rows, s.columns, s.tile[1], s.num_scales, kind,
                dtypes[1], t.first_element, t.name,
            )  # fmt: skip
            seed = group["seed"] if group["stochastic_rounding"] else None
            rows.setdefault((s.tile, seed, dtypes), []).append(row)
        result: list[Launch] = []
        for (tile, seed, dtypes), chosen in rows.items():
            variant = partial(quantized_variant, tile, Types(dtypes[0], dtypes[1], seed is not None))
            result += launches_of(chosen, seed, variant)
        return result

    def _tile_steps(self, device: torch.device, stretches: list[tuple[Run, int, Stretch]]) -> list[_Call]:
        limit = per_device(device, cpu=CPU_CHUNK, accelerator=ACCELERATOR_CHUNK)
        pieces = [(run, kind, piece) for run, kind, whole in stretches for piece in whole.pieces(limit)]
        size = max(TileScratch.size(piece) for _, _, piece in pieces)
        scratch, rounder, calls = TileScratch(device, size, BUFFERS + 2), None, []
        if any(e.group["stochastic_rounding"] for e in self.entries):
            rounder = Rounder(size, device)
        for run, kind, piece in pieces:
            i = run.members[0]
            seed = self._seed(i)
            rounding = None if rounder is None or seed is None else (rounder, seed)
            tiles = TileStep(self._tensors(i, piece), piece, scratch, rounding)
            calls.append(_Call(tiles, run, piece, kind))
        return calls
