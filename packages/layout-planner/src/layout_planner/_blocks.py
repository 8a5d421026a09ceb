"""Blocks (runs that may not be cut) and the grid of cut points that a block leaves in a tensor.

    tensor (5, C), Rows(2)         |-- 2C --|-- 2C --|- C -|        the last block is short
                                   0        2C       4C    5C       cut points
    tensor (2, 3, C), Rows(2),     |- 2C -|C|- 2C -|C|
      period 3C (one expert)       0      2C 3C    5C 6C            blocks start over in each period

A cut point is a row-major element offset at which a shard may end.
"""

import math
from dataclasses import dataclass, field

from layout_planner._checks import check_integer


@dataclass(frozen=True)
class _Counted:
    count: int = 1

    def __post_init__(self) -> None:
        check_integer(f"{type(self).__name__}: count", self.count, 1)

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()}:{self.count}"


@dataclass(frozen=True)
class Rows(_Counted):
    """`count` consecutive rows; a row is one run of the innermost dimension (one element of a 1-D tensor)."""


@dataclass(frozen=True)
class Tile:
    """Tiles of `rows` x `columns` of every matrix (the last two dimensions).

    Memory is row-major, so a tile stays on one rank only if the cuts fall between bands of `rows` full rows.
    Tiles never reach from one stacked matrix into the next.
    """

    rows: int
    columns: int

    def __post_init__(self) -> None:
        check_integer("Tile: rows", self.rows, 1)
        check_integer("Tile: columns", self.columns, 1)

    def __str__(self) -> str:
        return f"tile:{self.rows}x{self.columns}"


@dataclass(frozen=True)
class Whole:
    """The whole tensor."""

    def __str__(self) -> str:
        return "whole"


@dataclass(frozen=True)
class Elements(_Counted):
    """`count` consecutive elements, for any shape."""


Block = Rows | Tile | Whole | Elements


def parse_block(text: str) -> Block:
    """Read a block from its printed form: `rows:32`, `tile:32x32`, `whole` or `elements:256`.

    Raises:
        ValueError: `text` is not one of these; the message lists them.
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
    raise ValueError(f"block {text!r} is not a known kind; write {_FORMS}")


_FORMS = "rows:N, tile:RxC, elements:N or whole, with positive integers"


@dataclass(frozen=True)
class BlockGrid:
    """The cut points of one tensor: multiples of `block` inside each `period`; a period's last block may be short.

    Kept in normal form, so that equal sets of cut points compare equal: if the period is a multiple of the
    block (or is the whole tensor), the grid is uniform and `period == numel`.

    Attributes:
        numel: elements in the tensor.
        block: elements in a full block, at most `period`.
        period: elements after which blocks start over; divides `numel`.
        uniform: whether every cut point is a multiple of `block`.
    """

    numel: int
    block: int
    period: int
    uniform: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if min(self.numel, self.block, self.period) < 1 or self.numel % self.period:
            raise ValueError(
                f"a block grid of {self.numel} elements cannot have period {self.period} and block {self.block}"
            )
        block = min(self.block, self.period)
        object.__setattr__(self, "block", block)
        if self.period % block == 0:
            object.__setattr__(self, "period", self.numel)
        object.__setattr__(self, "uniform", self.period == self.numel)

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the tensor, including short ones."""
        return (self.numel // self.period) * -(-self.period // self.block)

    def are_cuts(self, first: int, step: int, count: int) -> bool:
        """Whether `first`, `first + step`, ... (`count` of them, inside the tensor) are all cut points."""
        if count < 1:
            return True
        if self.uniform:
            return first % self.block == 0 and (count == 1 or step % self.block == 0)
        # Offsets within a period repeat after `cycle` steps.
        cycle = self.period // math.gcd(step, self.period)
        return all(self.is_cut(first + k * step) for k in range(min(count, cycle)))

    def is_cut(self, offset: int) -> bool:
        """Whether a shard may end `offset` elements into the tensor. Both ends of the tensor are cut points."""
        return (0 <= offset <= self.numel and offset % self.period % self.block == 0) or offset == self.numel


def grid_of(name: str, shape: tuple[int, ...], block: Block) -> BlockGrid:
    """The cut points that `block` leaves in a tensor; ValueError for another shape, TypeError if it is no block."""
    numel = math.prod(shape)
    width = shape[-1] if len(shape) > 1 else 1
    period = numel
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
                    f"{name}: {block} does not apply to a tensor of shape {shape}, which has no rows and columns; "
                    "use Rows or Elements for it"
                )
            size, period = rows * width, shape[-2] * width
        case _:
            raise TypeError(f"{name}: {block!r} is not a block; use Rows, Tile, Whole or Elements")
    return BlockGrid(numel, size, period)
