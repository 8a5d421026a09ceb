"""One tensor of a group as the planner sees it, and one buffer of a layout."""

from dataclasses import dataclass, field

from layout_planner._blocks import Block, BlockGrid, Rows, grid_of
from layout_planner._checks import check_integers


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to place: its name, its shape, and which of its elements must stay together.

    Args:
        name: unique in its group.
        shape: dimensions in elements, each at least 1; `()` is a scalar.
        block: the smallest run of elements that stays on one rank. A `Tile` starts over in each stacked matrix.

    Attributes:
        grid: where it may be cut.
        numel: its elements.

    Raises:
        ValueError: a dimension below 1, or a block that does not apply to the shape; names the tensor.
    """

    name: str
    shape: tuple[int, ...]
    block: Block = Rows(1)
    grid: BlockGrid = field(init=False, repr=False, compare=False)
    numel: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        check_integers(f"{self.name}: a size in shape {self.shape}", self.shape, 1)
        object.__setattr__(self, "grid", grid_of(self.name, self.shape, self.block))
        object.__setattr__(self, "numel", self.grid.numel)


@dataclass(frozen=True)
class Segment:
    """A buffer of `world_size` equal shards.

    Attributes:
        shard_size: elements that each rank holds.
        names: the tensors in it, in buffer order.
        offsets: where each of them starts, in elements from the start of the buffer.
    """

    shard_size: int
    names: tuple[str, ...]
    offsets: tuple[int, ...]

    def local_range(self, offset: int, numel: int, rank: int) -> tuple[int, int]:
        """The range `[start, stop)` that `rank` holds of a tensor of `numel` elements that starts at `offset`."""
        start, stop = rank * self.shard_size - offset, (rank + 1) * self.shard_size - offset
        return min(max(start, 0), numel), min(max(stop, 0), numel)

    def local_lengths(self, offset: int, numel: int, world_size: int) -> list[int]:
        """How many elements of such a tensor each rank holds."""
        size, lengths = self.shard_size, [0] * world_size
        while numel:
            rank = offset // size
            lengths[rank] = min((rank + 1) * size - offset, numel)
            offset, numel = offset + lengths[rank], numel - lengths[rank]
        return lengths
