"""Groups whose parameters, or gradients, are quantized for a collective. Shards hold values.

`BlockGradsGroup`   gradients are sent as codes of blocks; parameters in the compute dtype
`OnWireGroup`       parameters are quantized before a gather, and read back after it
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from dbuffer import WireForm
from dbuffer.encodings import BlockFormat, BlocksOnWire, CodeRows
from layout_planner import Layout

from .._params.group import Group
from .._plan.group import ALIGNMENT, Dtypes, GroupMemory, Request, dtypes_for, planned
from .._plan.param import ManagedParam
from .blocks import common_block

Params = Sequence[ManagedParam[Any]]


class BlockGradsGroup(Group):
    """Gradients of selected parameters are sent as codes; parameters are cut between rows."""

    @classmethod
    def lay_out(cls, params: Params, request: Request, dtypes: Dtypes) -> tuple[Layout, WireForm | None]:
        """A layout that cuts between rows."""
        return planned(params, request, dtypes.alignment, partial(common_block, 1)), None


class OnWireGroup(Group):
    """Parameters are gathered as codes of blocks, and read back."""

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
        weights = cast(Any, request.quantization).weights
        layout = planned(params, request, ALIGNMENT, partial(common_block, weights.tile[0]))
        return layout, BlocksOnWire(weights)

    @property
    def wire_format(self) -> BlockFormat | None:
        """The blocks that values are quantized in before a gather."""
        return self.plan.wire.format if isinstance(self.plan.wire, BlocksOnWire) else None

    @property
    def row_bytes(self) -> int:
        """Bytes of one rank's codes and scales."""
        wire: Any = self.plan.wire
        return CodeRows(self.plan.layout, wire.format).row_bytes

    def expect_update(self) -> None:
        """Quantize again before the next gather, even if the version counter does not change."""
        if self.buffer is not None:
            self.buffer.forget_encoding()

    def memory(self) -> GroupMemory:
        """Codes are kept in addition to the shards; all ranks' are gathered before they are read back."""
        values, ranks = super().memory(), self.plan.data.shard_size
        values.gather = values.codes = self.row_bytes
        values.gathered = [ranks * size * self.plan.dtypes.compute.itemsize for size in self.segment_sizes()]
        values.decoding = [ranks * self.row_bytes]
        return values
