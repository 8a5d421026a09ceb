"""The gathers of whole models in bf16 and as quantized tiles, over world sizes and tiles."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from layout_planner._blocks import Block
from layout_planner._quantized import QuantizedPlan, plan_quantized
from layout_planner._sweep import Options
from layout_planner._table import Table, size
from layout_planner.models import GroupShape, ModelShape

Shape = tuple[int, int]


@dataclass(frozen=True)
class GatherMeasure:
    """Bytes of one gather of all matrices of a model, all layers counted, at one world size with one tile.

    Attributes:
        world_size: ranks.
        tile: rows and columns that share a scale.
        block: what stays on one rank in bf16.
        bf16: without quantizing.
        whole: with whole tiles in every group.
        shared: with tiles cut between rows in every group.
        auto: with the better of both in each group.
        amax: of the all-reduce that `shared` needs once an optimizer step.
    """

    world_size: int
    tile: Shape
    block: Block
    bf16: int
    whole: int
    shared: int
    auto: int
    amax: int

    def to_dict(self) -> dict[str, object]:
        """The fields as JSON values."""
        names = ("bf16", "whole", "shared", "auto", "amax")
        amounts = {f"{name}_bytes": getattr(self, name) for name in names}
        return {
            "world_size": self.world_size,
            "tile": list(self.tile),
            "block": str(self.block),
            **amounts,
        }


def plan_matrices(
    group: GroupShape, world_size: int, block: Block, tile: Shape, options: Options
) -> QuantizedPlan | None:
    """The quantized layouts of one layer's matrices; None where it has none.

    Raises:
        ValueError: as `plan_quantized`.
    """
    specs = [spec for spec in group.specs(block, options.period) if len(spec.shape) > 1]
    return plan_quantized(specs, world_size, tile, max_segments=options.max_segments) if specs else None


def sweep_gathers(
    model: ModelShape,
    world_sizes: Iterable[int],
    blocks: Sequence[Block],
    tiles: Sequence[Shape],
    options: Options,
) -> Iterator[GatherMeasure]:
    """One measure per tile, block and world size; each is yielded as soon as it is ready."""
    for tile in tiles:
        for block in blocks:
            for world_size in sorted(set(world_sizes)):
                totals = [0] * 5
                for group in model.groups:
                    plan = plan_matrices(group, world_size, block, tile, options)
                    if plan is not None:
                        sizes = (
                            plan.bf16_bytes,
                            plan.whole_bytes,
                            plan.shared_bytes,
                            plan.auto_bytes,
                            plan.amax_bytes,
                        )
                        totals = [total + group.count * n for total, n in zip(totals, sizes, strict=True)]
                yield GatherMeasure(world_size, tile, block, *totals)


def gathers_table(blocks: Sequence[Block]) -> Table:
    """The table whose rows `gathers_row` makes."""
    headers = ("<tile", "<block", "ranks", *_HEADERS, "auto", "x bf16")
    return Table(headers, (7, max(len(str(block)) for block in blocks), 5, 7, 7, 6, 7, 6, 7, 7, 6))


def gathers_row(measure: GatherMeasure) -> list[str]:
    """One row: bytes of a gather in bf16, with whole tiles, with shared ones, and of the better in each group."""
    m = measure
    cells = _cells(m.bf16, m.whole, m.shared, m.amax)
    return [_text(m.tile), str(m.block), str(m.world_size), *cells, *_against(m.auto, m.bf16)]


_HEADERS = ("bf16", "whole", "x bf16", "shared", "x bf16", "amax")
GROUP_HEADERS = ("<group", "layers", "<tile", *_HEADERS, "<auto")


def group_row(group: GroupShape, plan: QuantizedPlan) -> list[str]:
    """One layer of a group: as `gathers_row`, and the choice."""
    cells = _cells(plan.bf16_bytes, plan.whole_bytes, plan.shared_bytes, plan.amax_bytes)
    return [group.name, f"{group.count:,}", _text(plan.tile), *cells, plan.cut]


def group_dict(group: GroupShape, plan: QuantizedPlan) -> dict[str, object]:
    """One layer of a group, for JSON."""
    return {
        "name": group.name,
        "layers": group.count,
        "tile": list(plan.tile),
        "bf16_bytes": plan.bf16_bytes,
        "whole_bytes": plan.whole_bytes,
        "shared_bytes": plan.shared_bytes,
        "amax_bytes": plan.amax_bytes,
        "auto": plan.cut,
    }


def _text(tile: Shape) -> str:
    return f"{tile[0]}x{tile[1]}"


def _cells(bf16: int, whole: int, shared: int, amax: int) -> list[str]:
    """The cells below `_HEADERS`."""
    return [size(bf16), *_against(whole, bf16), *_against(shared, bf16), size(amax)]


def _against(nbytes: int, bf16: int) -> tuple[str, str]:
    return size(nbytes), f"{nbytes / bf16:.3f}" if bf16 else ""
