"""What may not be cut: the block kinds, and the grid of cut points that a block lays over a tensor.

    tensor (5, C), Rows(2)         |-- 2C --|-- 2C --|- C -|        the last block is short
                                   0        2C       4C    5C       cut points
    tensor (2, 3, C), Rows(2),     |- 2C -|C|- 2C -|C|
      period 3C (one expert)       0      2C 3C    5C 6C            blocks start anew in each period

A cut point is an element offset, row-major, at which a shard may end.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Rows:
    """`count` consecutive rows; a row is one run of the innermost dimension (one element of a 1-D tensor)."""

    count: int = 1

    def __post_init__(self) -> None:
        _positive("Rows", count=self.count)

    def __str__(self) -> str:
        return f"rows:{self.count}"


@dataclass(frozen=True)
class Tile:
    """Tiles of `rows` x `columns` of every matrix (the last two dimensions).

    A tile spans columns but memory is row-major, so keeping tiles whole means cutting only between bands of
    `rows` full rows. Tiles never reach from one stacked matrix into the next.
    """

    rows: int
    columns: int

    def __post_init__(self) -> None:
        _positive("Tile", rows=self.rows, columns=self.columns)

    def __str__(self) -> str:
        return f"tile:{self.rows}x{self.columns}"


@dataclass(frozen=True)
class Whole:
    """The whole tensor, or with a period each period (one expert of a stacked weight)."""

    def __str__(self) -> str:
        return "whole"


@dataclass(frozen=True)
class Elements:
    """`count` consecutive elements, whatever the shape."""

    count: int = 1

    def __post_init__(self) -> None:
        _positive("Elements", count=self.count)

    def __str__(self) -> str:
        return f"elements:{self.count}"


Block = Rows | Tile | Whole | Elements


def parse_block(text: str) -> Block:
    """Read a block from its printed form: `rows:32`, `tile:32x32`, `whole` or `elements:256`.

    Raises:
        ValueError: `text` is none of these; the message lists them.
    """
    kind, _, size = text.partition(":")
    try:
        if kind == "rows":
            return Rows(int(size))
        if kind == "elements":
            return Elements(int(size))
        if kind == "tile":
            rows, columns = size.split("x")
            return Tile(int(rows), int(columns))
        if kind == "whole" and not size:
            return Whole()
    except ValueError as error:
        raise ValueError(f"block {text!r}: {error}; write {_FORMS}") from None
    raise ValueError(f"block {text!r} is of no known kind; write {_FORMS}")


_FORMS = "rows:N, tile:RxC, elements:N or whole, with positive integers"


@dataclass(frozen=True)
class BlockGrid:
    """The cut points of one tensor: multiples of `block` inside each `period`; a period's last block may be short.

    Kept in normal form, so that equal sets of cut points compare equal: where the period is a multiple of
    the block (or is the tensor), the grid is uniform and `period == numel`.

    Attributes:
        numel: elements in the tensor.
        block: elements in a full block, at most `period`.
        period: elements after which blocks start anew; divides `numel`.
    """

    numel: int
    block: int
    period: int

    def __post_init__(self) -> None:
        if min(self.numel, self.block, self.period) < 1 or self.numel % self.period:
            raise ValueError(
                f"no block grid of {self.numel} elements has period {self.period} and block {self.block}"
            )
        block = min(self.block, self.period)
        object.__setattr__(self, "block", block)
        if self.period % block == 0:
            object.__setattr__(self, "period", self.numel)

    @property
    def uniform(self) -> bool:
        """Whether every cut point is a multiple of `block`."""
        return self.period == self.numel

    @property
    def num_blocks(self) -> int:
        """Blocks in the tensor, short ones counted."""
        return (self.numel // self.period) * -(-self.period // self.block)

    def is_cut(self, offset: int) -> bool:
        """Whether a shard may end `offset` elements into the tensor (its two ends count as cut points)."""
        return (
            0 <= offset <= self.numel and (offset % self.period) % self.block == 0
        ) or offset == self.numel


def grid_of(name: str, shape: tuple[int, ...], block: Block, period: int | None) -> BlockGrid:
    """The cut points that `block` leaves in a tensor of this shape.

    Raises:
        ValueError: naming the tensor, where the period does not divide it or the block has no meaning for it.
    """
    numel = math.prod(shape)
    width = shape[-1] if len(shape) > 1 else 1
    if period is not None and (period < 1 or numel % period):
        raise ValueError(
            f"{name}: a period of {period} elements does not divide its {numel} elements (shape {shape}); "
            "give the elements of one stacked matrix, or None"
        )
    match block:
        case Rows(count):
            size = count * width
        case Elements(count):
            size = count
        case Whole():
            size = numel
        case Tile(rows, _):
            if len(shape) < 2:
                raise ValueError(
                    f"{name}: {block} cannot fit a tensor of shape {shape}, which has no rows and columns; "
                    "use Rows or Elements for it"
                )
            size, matrix = rows * width, shape[-2] * width
            if period is not None and matrix % period and period % matrix:
                raise ValueError(f"{name}: a period of {period} elements cuts through matrices of {matrix}")
            period = matrix if period is None else min(period, matrix)
            if period % width:
                raise ValueError(f"{name}: a period of {period} elements ends inside a row of {width}")
        case _:
            raise TypeError(f"{name}: {block!r} is no block; use Rows, Tile, Whole or Elements")
    return BlockGrid(numel, size, numel if period is None else period)


def _positive(kind: str, **fields: int) -> None:
    for field, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{kind}: {field} is {value!r}, which is not a positive integer")
