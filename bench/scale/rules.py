"""How the systems compared on paper lay out and move a unit."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """How a system lays out and moves a unit of n padded elements.

    Attributes:
        padding: which of `padding.RULES`.
        gather_passes, reduce_passes: times that gathered weights, and gradients, are copied next to the collectives.
        gathered, reducing: full-size buffers alive at the peak, in units, for weights and for gradients.
    """

    label: str
    padding: str
    block: str
    gather_passes: float
    reduce_passes: float
    gathered: float
    reducing: float


SYSTEMS = (
    Rules("ours", "ours", "rows:1", 0, 1, 2, 1),
    Rules("ours, blocks of 32 rows", "ours", "rows:32", 0, 1, 2, 1),
    Rules("FSDP2", "even rows (FSDP2)", "rows:1", 1, 1, 3, 2),
    Rules("Megatron-FSDP", "lcm (Megatron-FSDP)", "rows:1", 0, 1, 2, 4),
)
