"""Blocks that quantized parameters can have."""

import math
from collections.abc import Sequence

from layout_planner import Block, Elements, Rows, Tile, Whole


def common_block(rows: int, block: Block | None, shape: Sequence[int]) -> Block:
    """The smallest block that holds whole blocks of a block policy and whole tiles of a number of rows.

    Tiles start over in each stacked matrix, and a tensor of one dimension is one row: cuts lie between rows.
    """
    if len(shape) < 2:
        return Whole()
    matrix, width = shape[-2], shape[-1]
    uniform = len(shape) == 2 or matrix % rows == 0
    match block:
        case None:
            return Tile(rows, width)
        case Tile(count, columns):
            return Tile(math.lcm(count, rows), columns)
        case Rows(count):
            if count == 1:
                return Tile(rows, width)
            return Rows(math.lcm(count, rows if uniform else matrix))
        case Elements(count):
            return Elements(math.lcm(count, (rows if uniform else matrix) * width))
    return block
