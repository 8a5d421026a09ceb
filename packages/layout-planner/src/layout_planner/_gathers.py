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
        return {
            "world_size": self.world_size,
            "tile": list(self.tile),
            "block": str(self.block),
            "bf16_bytes": self.bf16,
            "whole_bytes": self.whole,
            "shared_bytes": self.shared,
            "auto_bytes": self.auto,
            "amax_bytes": self.amax,
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


def measure_gathers(
    model: ModelShape, world_size: int, block: Block, tile: Shape, options: Options
) -> GatherMeasure:
    """Plan each group's matrices and add the bytes up, each times its number of layers."""
    totals = [0] * 5
    for group in model.groups:
        planned = plan_matrices(group, world_size, block, tile, options)
        if planned is not None:
            sizes = (
                planned.bf16_bytes,
                planned.whole_bytes,
                planned.shared_bytes,
                planned.bytes_of(planned.cut),
                planned.amax_bytes,
            )
            totals = [total + group.count * more for total, more in zip(totals, sizes, strict=True)]
    return GatherMeasure(world_size, tile, block, *totals)


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
                yield measure_gathers(model, world_size, block, tile, options)


def gathers_table(blocks: Sequence[Block]) -> Table:
    """The table whose rows `gathers_row` makes."""
    headers = (
        "<tile",
        "<block",
        "ranks",
        "bf16",
        "whole",
        "x bf16",
        "shared",
        "x bf16",
        "amax",
        "auto",
        "x bf16",
    )
    return Table(headers, (7, max(len(str(block)) for block in blocks), 5, 7, 7, 6, 7, 6, 7, 7, 6))


def gathers_row(measure: GatherMeasure) -> list[str]:
    """One row: bytes of a gather in bf16, with whole tiles, with shared ones, and of the better in each group."""
    return [
        tile_text(measure.tile),
        str(measure.block),
        str(measure.world_size),
        size(measure.bf16),
        *_against(measure.whole, measure.bf16),
        *_against(measure.shared, measure.bf16),
        size(measure.amax),
        *_against(measure.auto, measure.bf16),
    ]


GROUP_HEADERS = ("<group", "layers", "<tile", "bf16", "whole", "x bf16", "shared", "x bf16", "amax", "<auto")


def group_row(group: GroupShape, measure: QuantizedPlan) -> list[str]:
    """One layer of a group: as `gathers_row`, and the choice."""
    return [
        group.name,
        f"{group.count:,}",
        tile_text(measure.tile),
        size(measure.bf16_bytes),
        *_against(measure.whole_bytes, measure.bf16_bytes),
        *_against(measure.shared_bytes, measure.bf16_bytes),
        size(measure.amax_bytes),
        measure.cut,
    ]


def group_dict(group: GroupShape, measure: QuantizedPlan) -> dict[str, object]:
    """One layer of a group, for JSON."""
    return {
        "name": group.name,
        "layers": group.count,
        "tile": list(measure.tile),
        "bf16_bytes": measure.bf16_bytes,
        "whole_bytes": measure.whole_bytes,
        "shared_bytes": measure.shared_bytes,
        "amax_bytes": measure.amax_bytes,
        "auto": measure.cut,
    }


def tile_text(tile: Shape) -> str:
    """`128x128`."""
    return f"{tile[0]}x{tile[1]}"


def _against(bytes_: int, bf16: int) -> tuple[str, str]:
    return size(bytes_), f"{bytes_ / bf16:.3f}" if bf16 else ""
