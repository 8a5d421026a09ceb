"""One tensor of a group, as the planner sees it."""

import math
from dataclasses import dataclass, field

from layout_planner._blocks import Block, BlockGrid, Rows, grid_of


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to place: its name, shape, and what of it may not be cut.

    Args:
        name: unique in its group.
        shape: dimensions in elements, each at least 1; `()` is a scalar.
        block: the smallest run that stays on one rank.
        period: elements after which blocks start anew, such as one expert of a stacked weight; divides the
            tensor. None: the tensor (for `Tile`: each matrix, since no tile reaches into the next one).

    Raises:
        ValueError: a dimension below 1, or a block or period that cannot fit; the message names the tensor.
    """

    name: str
    shape: tuple[int, ...]
    block: Block = Rows(1)
    period: int | None = None
    grid: BlockGrid = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        for size in self.shape:
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"{self.name}: shape {self.shape} has the size {size!r}; sizes are integers from 1 up"
                )
        object.__setattr__(self, "grid", grid_of(self.name, self.shape, self.block, self.period))

    @property
    def numel(self) -> int:
        """Elements in the tensor."""
        return math.prod(self.shape)
