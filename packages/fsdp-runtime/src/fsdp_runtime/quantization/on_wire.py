"""Groups whose parameters, or gradients, are quantized for a collective. Shards hold values.

`BlockGradsGroup`   gradients are sent as codes of blocks; parameters in the compute dtype
`OnWireGroup`       parameters are quantized before a gather, and read back after it
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast

from dbuffer import WireForm
from dbuffer.encodings import BlocksAtRest, BlocksOnWire
from layout_planner import Block, Elements, Layout, Rows, Tile, Whole

from .._params.group import Group
from .._plan.group import ALIGNMENT, Dtypes, GroupMemory, Request, dtypes_for, planned
from .._plan.param import ManagedParam

Params = Sequence[ManagedParam[Any]]


def common_block(rows: int, block: Block | None, shape: Sequence[int]) -> Block:
    """The smallest block that holds whole blocks of a block policy and whole tiles of a number of rows.

    Tiles start over in each stacked matrix, and a tensor of one dimension is one row: cuts lie between rows.
    """
    if len(shape) < 2:
        return Whole()
    matrix, width = shape[-2], shape[-1]
    uniform = len(shape) == 2 or matrix % rows == 0
    match block:
        case None | Rows(1):
            return Tile(rows, width)
        case Tile(count, columns):
            return Tile(math.lcm(count, rows), columns)
        case Rows(count):
            return Rows(math.lcm(count, rows if uniform else matrix))
        case Elements(count):
            return Elements(math.lcm(count, (rows if uniform else matrix) * width))
    return block


class BlockGradsGroup(Group):
    """Gradients of selected parameters are sent as codes; parameters are cut between rows."""

    @classmethod
    def lay_out(cls, params: Params, request: Request, dtypes: Dtypes) -> tuple[Layout, WireForm | None]:
        """A layout that cuts between rows."""
        return planned(params, request, dtypes.alignment, partial(common_block, 1)), None


class OnWireGroup(Group):
    """Parameters are gathered as codes of blocks, and read back."""

    form: ClassVar[type[BlocksOnWire | BlocksAtRest]] = BlocksOnWire  # the wire form

    @classmethod
    def check(cls, param: ManagedParam[Any], request: Request) -> None:
        """Raise ValueError, naming the parameter, if its values cannot be quantized."""
        dtypes, policy = dtypes_for(param.dtype, param.precision), cast(Any, request.quantization)
        try:
            for dtype in (dtypes.kept, dtypes.compute):
                BlocksOnWire(policy.blocks).dtypes(dtype, dtype)
        except ValueError as error:
            raise ValueError(
                f"quantize: parameter {param.name} was selected: {error}; convert it, or do not select it "
                "(QuantizationPolicy.select)"
            ) from error

    @classmethod
    def lay_out(cls, params: Params, request: Request, dtypes: Dtypes) -> tuple[Layout, WireForm | None]:
        """A layout that cuts no tile."""
        blocks = cast(Any, request.quantization).blocks
        layout = planned(params, request, ALIGNMENT, partial(common_block, blocks.tile[0]))
        return layout, cls.form(blocks)

    def expect_update(self) -> None:
        """Quantize again before the next gather, even if the version counter does not change."""
        if self.buffer is not None:
            self.buffer.forget_encoding()

    def memory(self) -> GroupMemory:
        """Codes are kept in addition to the shards; all ranks' are gathered before they are read back."""
        values, ranks, wire = super().memory(), self.plan.data.shard_size, cast(Any, self.plan.wire)
        codes, itemsize = wire.row_bytes(self.plan.geometry), self.plan.dtypes.compute.itemsize
        gathered = tuple(ranks * size * itemsize for size in self.segment_sizes())
        return replace(values, sent=codes, codes=codes, gathered=gathered, decoding=(ranks * codes,))
