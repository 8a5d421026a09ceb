"""The padding of whole models over world sizes and blocks, compared with the baselines and the lower bound."""

from dataclasses import asdict, dataclass
from functools import lru_cache

from layout_planner._blocks import Block
from layout_planner._layout import Layout
from layout_planner._plan import plan
from layout_planner._table import percent, size
from layout_planner.baselines import even_rows, lcm_rule
from layout_planner.models import GroupShape, ModelShape

BF16 = 2  # bytes


@dataclass(frozen=True)
class Options:
    """How groups are planned: arguments of `plan`."""

    align: int = 8
    max_segments: int = 4


@dataclass(frozen=True)
class Measure:
    """The size of a whole model, all layers counted, in elements, at one world size with one block."""

    world_size: int
    block: Block  # the block of every tensor
    numel: int  # without padding
    planned: int  # with this package's plan
    even_rows: int  # with even row chunks (FSDP2)
    lcm: int  # with the lcm rule (Megatron-FSDP)
    lower_bound: int  # the least that every plan of these groups needs

    def padding(self, padded: int | None = None) -> float:
        """Padding divided by the elements: of the plan, or of the size given."""
        return (self.planned if padded is None else padded) / self.numel - 1

    @property
    def gap(self) -> float:
        """How far the plan is above the lower bound."""
        return self.planned / self.lower_bound - 1

    @property
    def bytes_per_rank(self) -> float:
        """Bytes that a rank holds in bf16, padding included."""
        return BF16 * self.planned / self.world_size

    def to_dict(self) -> dict[str, object]:
        """The fields, and the figures made of them, as JSON values."""
        ratios = {"padding": self.padding(), "gap": self.gap, "bf16_bytes_per_rank": self.bytes_per_rank}
        return {**asdict(self), "block": str(self.block), **ratios}


def plan_group(group: GroupShape, world_size: int, block: Block, options: Options) -> Layout:
    """The layout of one layer of the group; raises as `plan` and `GroupShape.specs` do."""
    specs = group.specs(block)
    return plan(specs, world_size, align=options.align, max_segments=options.max_segments)


@lru_cache(maxsize=4096)
def measure(model: ModelShape, world_size: int, block: Block, options: Options) -> Measure:
    """Plan each group of the model once and add the sizes up, each times its number of layers."""
    totals = [0] * 5
    for group in model.groups:
        layout = plan_group(group, world_size, block, options)
        sizes = (
            layout.numel,
            layout.padded_numel,
            even_rows(layout.tensors, world_size),
            lcm_rule(layout.tensors, world_size),
            layout.lower_bound,
        )
        totals = [total + group.count * size for total, size in zip(totals, sizes, strict=True)]
    return Measure(world_size, block, *totals)


SWEEP_HEADERS = ("<block", "ranks", "ours", "even rows", "lcm", "lower bound", "gap", "per rank, bf16")


def sweep_row(measure: Measure) -> list[str]:
    """One row under `SWEEP_HEADERS`; padding is in per cent of the elements."""
    return [
        str(measure.block),
        str(measure.world_size),
        percent(measure.padding()),
        percent(measure.padding(measure.even_rows)),
        percent(measure.padding(measure.lcm)),
        percent(measure.padding(measure.lower_bound)),
        percent(measure.gap),
        size(measure.bytes_per_rank),
    ]
