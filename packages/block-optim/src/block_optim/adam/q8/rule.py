"""AdamW with 8-bit moments over blocks: the update rule, apart from the optimizer that hosts it.

    runs        where parameters, gradients and codes are neighbours in the same order, without gaps
    stretches   consecutive blocks of one width: a matrix of tiles, over several parameters if they fit together
    tile steps  stretches cut between bands of tiles to the size of the scratch

On CPU (and on CUDA without Triton) a tile step is a list of torch ops; on CUDA all stretches are one Triton launch.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from block_optim.adam.q8.codec import VERSION
from block_optim.adam.q8.launch import Launch, Row, scalar_table
from block_optim.adam.q8.ops import BUFFERS, TileStep, TileTensors, rates_of
from block_optim.adam.q8.variants import Types, quantized_variant
from block_optim.core._torch_compat import foreach_add_, local_of
from block_optim.core.gradients import StepGradients
from block_optim.core.grid import (
    AUTO,
    LARGEST,
    ScaleLayout,
    auto_blocks,
    block_for,
    check_block,
    scale_layout,
)
from block_optim.core.params import Group, Param
from block_optim.core.rounding import Rounder
from block_optim.core.runs import FlatSpace, Run, joint_runs, offset_of
from block_optim.core.scratch import per_device
from block_optim.core.tiles import Stretch, TileScratch, merged, stretches_of
from layout_planner import Elements, Tile
from ragged_shard.device import CPU, has_triton

FORMAT = "format"  # key of a state's record
_FIELD = LARGEST + 1
CPU_CHUNK, ACCELERATOR_CHUNK = 1 << 17, 1 << 22  # elements of a tile step


@dataclass
class Codes:
    """A parameter with its states as plain local tensors, and its blocks."""

    param: Param
    step: torch.Tensor
    layout: ScaleLayout
    codes: tuple[torch.Tensor, torch.Tensor]
    scales: tuple[torch.Tensor, torch.Tensor]  # flat

    @property
    def group(self) -> Group:
        """The parameter's options."""
        return self.param.group

    @property
    def scale_memory(self) -> tuple[int, int, int]:
        """Equal for parameters whose scales may be neighbours: both storages, and the difference of their offsets."""
        first, second = self.scales
        storages = first.untyped_storage().data_ptr(), second.untyped_storage().data_ptr()
        return *storages, offset_of(second) - offset_of(first)


class QuantizedRule:
    """States of parameters with 8-bit moments, and their update.

    step                    fp32 count
    exp_avg, exp_avg_sq     codes: uint8, param-shaped; their scales in `.._scale`
    format                  int64, which codes and blocks these are; the state is read by it, also after loading
    """

    def __init__(self) -> None:
        self._entries: dict[torch.Tensor, Codes] = {}
        self._plan: _Plan | None = None

    def init_states(self, params: Sequence[Param], state: dict[torch.Tensor, Any]) -> None:
        """Make codes and scales in flat buffers for each device."""
        for device in dict.fromkeys(p.device for p in params):
            self._init_on(device, [p for p in params if p.device == device], state)

    def _init_on(self, device: torch.device, params: list[Param], state: dict[torch.Tensor, Any]) -> None:
        layouts = [scale_layout(p, block_for(p, p.group["block"])) for p in params]
        space = FlatSpace([p.local for p in params])
        codes = [space.views(torch.zeros(space.numel, dtype=torch.uint8, device=device)) for _ in range(2)]
        # Scales in the order of memory, so that scales of neighbors are neighbors.
        counts = [layout.num_scales for layout in layouts]
        starts, end = [0] * len(params), 0
        for i in sorted(range(len(params)), key=lambda i: (space.offsets[i], counts[i])):
            starts[i], end = end, end + counts[i]
        first, second = (torch.zeros(end, dtype=torch.float32, device=device) for _ in range(2))
        steps = torch.zeros(len(params), dtype=torch.float32, device=CPU).unbind()
        formats = torch.tensor([record_of(layout.grid.block) for layout in layouts], device=CPU).unbind()
        for i, (param, layout) in enumerate(zip(params, layouts, strict=True)):
            stop = starts[i] + counts[i]
            wrapped = [layout.wrap(param, flat[starts[i] : stop]) for flat in (first, second)]
            state[param.tensor] = {
                "step": steps[i],
                "exp_avg": param.wrap(codes[0][i]),
                "exp_avg_scale": wrapped[0],
                "exp_avg_sq": param.wrap(codes[1][i]),
                "exp_avg_sq_scale": wrapped[1],
                FORMAT: formats[i],
            }

    def bind(self, params: Sequence[Param]) -> None:
        """Update these parameters, in the memory that their states have now, until this is called again."""
        self._entries = {p.tensor: self._entry(p, p.states) for p in params}
        self._plan = None

    def _entry(self, param: Param, state: Mapping[str, Any]) -> Codes:
        known, block = self._entries.get(param.tensor), block_of_record(param, state[FORMAT])
        if known is not None and known.param is param and known.layout.grid.block == block:
            layout = known.layout
        else:
            layout = scale_layout(param, block)
            if tuple(state["exp_avg_scale"].shape) != layout.grid.scale_shape:
                raise ValueError(
                    f"{param.name}: its state's {FORMAT!r} says blocks of {block}, which have scales of shape "
                    f"{layout.grid.scale_shape}; it has {tuple(state['exp_avg_scale'].shape)}. Assign both or none"
                )
        codes = [local_of(state[name]) for name in ("exp_avg", "exp_avg_sq")]
        scales = [local_of(state[f"{name}_scale"]).view(-1) for name in ("exp_avg", "exp_avg_sq")]
        return Codes(param, state["step"], layout, (codes[0], codes[1]), (scales[0], scales[1]))

    def read_saved(
        self, param: Param, saved: Mapping[str, Any], own: Mapping[str, Any], block: str
    ) -> dict[str, Any]:
        """A saved state with its record, of a group that was saved with ``block``, if its codes can be read here.

        States that were saved before they had a record get one where the group has it, or "auto" can have been one
        block only. ValueError, naming the parameter, for others, and for blocks that differ from the requested ones or
        that ranks cut.
        """
        record, scales, chosen = saved.get(FORMAT), saved["exp_avg_scale"], param.group["block"]
        if isinstance(record, torch.Tensor):
            found = block_of_record(param, record)
        elif isinstance(record, str) or block != AUTO:
            found = check_block(record if isinstance(record, str) else block)
        else:
            blocks = sorted(auto_blocks(param.shape, scales.shape), key=str)
            if len(blocks) > 1:
                names = " or ".join(repr(str(each)) for each in blocks)
                raise ValueError(
                    f"{param.name}: its saved 8-bit states do not record their blocks, and block='auto' depends on the "
                    f"mesh: they may be {names}. Set the state's entry {FORMAT!r} to the right one, or {_WAY_OUT}"
                )
            found = blocks[0] if blocks else block_for(param, chosen)
        if chosen not in (AUTO, str(found)):
            raise _unreadable(
                param, found, f"this optimizer has block={chosen!r}", f"build it with block={found!r}"
            )
        try:
            layout = scale_layout(param, found)
        except ValueError as error:
            way_out = "load them under the parallelism that they were saved under"
            raise _unreadable(param, found, f"which ranks cut here ({error})", way_out) from None
        target = own["exp_avg_scale"]
        if (layout.grid.scale_shape, layout.placements) != (
            tuple(target.shape),
            getattr(target, "placements", ()),
        ):
            other = block_for(param, chosen)
            raise _unreadable(
                param,
                found,
                f"block={chosen!r} gives it {other} here",
                f"build the optimizer with block={found!r}",
            )
        return {**saved, FORMAT: torch.tensor(record_of(found), device=CPU)}

    def update(self, active: StepGradients) -> None:
        """One step of the parameters that have gradients, which all are this rule's."""
        plan = self._plan
        if plan is None or plan.version != active.version or plan.rounding != _rounding_of(plan.groups):
            plan = self._plan = _Plan([self._entries[p.tensor] for p in active.params], active)
        plan.step(active)


_WAY_OUT = "leave its state out of the state dict: its moments then begin again"


def record_of(block: Elements | Tile) -> int:
    """The record of codes as they are written now: the version, and a block's rows (0: `Elements`) and columns.

    Nine decimal digits each: 1_000000001_000000256 is version 1, ``Tile(1, 256)``.
    """
    rows, columns = (block.rows, block.columns) if isinstance(block, Tile) else (0, block.count)
    return (VERSION * _FIELD + rows) * _FIELD + columns


def block_of_record(param: Param, record: torch.Tensor) -> Elements | Tile:
    """The block in a state's record; ValueError, naming the parameter, for codes of another version."""
    rest, columns = divmod(int(record), _FIELD)
    version, rows = divmod(rest, _FIELD)
    if version != VERSION or not columns:
        raise ValueError(
            f"{param.name}: its 8-bit states have codes of version {version}, this release of block-optim has version "
            f"{VERSION}; load them with a release that has theirs, or {_WAY_OUT}"
        )
    return Tile(rows, columns) if rows else Elements(columns)


def _unreadable(param: Param, block: Elements | Tile, reason: str, way_out: str) -> ValueError:
    return ValueError(
        f"{param.name}: its saved 8-bit states have blocks of {block}, {reason}; {way_out}, or {_WAY_OUT}"
    )


def _rounding_of(groups: Mapping[int, Group]) -> list[bool]:
    """The option of groups for which calls are prepared."""
    return [group["stochastic_rounding"] for group in groups.values()]


class _Plan:
    """Tile steps, or launches of a kernel, over stretches over runs; good as long as addresses stay.

    Parameters share a call if they are of one class: of groups with equal options, and of equal step counts.
    """

    def __init__(self, entries: list[Codes], active: StepGradients) -> None:
        self.version, self.entries, self.locals = active.version, entries, active.locals
        self.groups = {id(e.group): e.group for e in entries}
        self.rounding = _rounding_of(self.groups)
        # Gradients whose memory is in another order than their parameter's, with a buffer in the right one.
        self.odd = [
            (i, torch.empty_strided(local.shape, local.stride(), dtype=grad.dtype, device=grad.device))
            for i, (grad, local) in enumerate(zip(active.grads, self.locals, strict=True))
            if grad.stride() != local.stride() and not (grad.is_contiguous() and local.is_contiguous())
        ]
        self.classes: list[int] | None = None  # of each entry
        self.calls: list[tuple[Row, TileStep]] = []
        self.launches: list[tuple[torch.device, list[Launch]]] = []

    def step(self, active: StepGradients) -> None:
        """Count, and update."""
        if not self.entries:
            return
        grads = list(active.grads)
        for i, buffer in self.odd:
            grads[i] = buffer.copy_(grads[i])
        foreach_add_([e.step for e in self.entries], 1)
        keys = [(id(e.group), float(e.step)) for e in self.entries]
        known = {key: rates_of(self.groups[key[0]], key[1]) for key in set(keys)}
        own = [known[key] for key in keys]
        numbers = {rates: i for i, rates in enumerate(dict.fromkeys(own))}
        classes = [numbers[rates] for rates in own]
        if classes != self.classes:  # parameters can no longer share calls, or newly can
            self._build(classes, grads)
            self.classes = classes
        rates = list(numbers)
        for row, tiles in self.calls:
            tiles(row.stretch.matrix(grads[row.run.members[0]]), rates[row.kind])
        for device, launches in self.launches:
            table = scalar_table(rates, device)
            steps = torch.tensor([r.count for r in rates], dtype=torch.float32, device=device)
            for launch in launches:
                launch(grads, table, steps)

    def _build(self, classes: list[int], grads: list[torch.Tensor]) -> None:
        lists = [self.locals, grads, *([e.codes[i] for e in self.entries] for i in range(2))]
        # Parameters share a run if these match; one whose bf16 is rounded at random is alone.
        kinds = [
            (key, e.scale_memory, str(e.layout.grid.block), i if self._rounds(i) else None)
            for i, (key, e) in enumerate(zip(classes, self.entries, strict=True))
        ]
        result: dict[torch.device, list[tuple[Run, int, Stretch]]] = defaultdict(list)
        for run in joint_runs(lists, kinds):
            first = run.members[0]
            result[self.locals[first].device] += [(run, classes[first], s) for s in self._stretches(run)]
        self.calls, self.launches = [], []
        for device, stretches in result.items():
            if has_triton(device):
                self.launches.append((device, self._launches(stretches, grads)))
            else:
                self.calls += self._tile_steps(device, stretches)

    def _rounds(self, i: int) -> bool:
        """Whether the entry's parameter is rounded at random."""
        return bool(self.entries[i].group["stochastic_rounding"]) and self.locals[i].dtype == torch.bfloat16

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
            (entry.param.start or 0) + stretch.start,  # for stochastic rounding, of one-run parameters only
        )

    def _launches(self, stretches: list[tuple[Run, int, Stretch]], grads: list[torch.Tensor]) -> list[Launch]:
        rows: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
        for run, kind, s in stretches:
            i = run.members[0]
            rounds = self.entries[i].group["stochastic_rounding"]
            types = Types(self.locals[i].dtype, grads[i].dtype, rounds)
            row = Row(self._tensors(i, s), s, run, kind)
            rows[s.tile, types, row.aligned, row.single].append(row)
        result: list[Launch] = []
        for (tile, types, aligned, single), chosen in rows.items():
            best, scalar = (quantized_variant(tile, types, vectors, single) for vectors in (aligned, False))
            result.append(Launch(chosen, (best, scalar)))
        return result

    def _tile_steps(
        self, device: torch.device, stretches: list[tuple[Run, int, Stretch]]
    ) -> list[tuple[Row, TileStep]]:
        limit = per_device(device, cpu=CPU_CHUNK, accelerator=ACCELERATOR_CHUNK)
        pieces = [(run, kind, piece) for run, kind, whole in stretches for piece in whole.pieces(limit)]
        size = max(TileScratch.size(piece) for _, _, piece in pieces)
        scratch, rounder, calls = TileScratch(device, size, BUFFERS + 2), None, []
        if any(e.group["stochastic_rounding"] for e in self.entries):
            rounder = Rounder(size, device)
        for run, kind, piece in pieces:
            i = run.members[0]
            row = Row(self._tensors(i, piece), piece, run, kind)
            calls.append((row, TileStep(row.tensors, piece, scratch, rounder if self._rounds(i) else None)))
        return calls
