"""Groups whose parameters, or gradients, are quantized for a collective. Shards hold values.

`BlockGradsGroup`   gradients are sent as codes of blocks; parameters in the compute dtype
`OnWireGroup`       parameters are quantized before a gather, and read back after it
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import dbuffer
from dbuffer import BlockFormat, BlocksOnWire, CodePlanes, WireForm
from layout_planner import Layout

from ..._plan.group import ALIGNMENT, Dtypes, GroupMemory, Request, dtypes_for, planned
from ..._plan.param import ManagedParam
from ..._torch.streams import Streams
from ...quantization import QuantizationPolicy, check_values
from ..group import Group

MOST_OF_BF16 = 0.55  # of the bytes of a bf16 gather: the most that cut="auto" lets whole tiles take
Params = Sequence[ManagedParam[Any]]


def policy_of(request: Request) -> QuantizationPolicy:
    """The policy of a request that selects a parameter."""
    assert request.quantization is not None
    return request.quantization


class BlockGradsGroup(Group):
    """Gradients of selected parameters are sent as codes; parameters are cut between rows."""

    @classmethod
    def takes(cls, param: ManagedParam[Any], policy: QuantizationPolicy) -> bool:
        """Whether a selected parameter is of this kind."""
        return policy.blocks is None

    @classmethod
    def lay_out(cls, params: Params, request: Request, dtypes: Dtypes) -> tuple[Layout, WireForm | None]:
        """A layout that cuts between rows."""
        return planned(params, request, dtypes.alignment, 1), None


def share_amax(
    groups: Iterable[Group], streams: Streams, after: Sequence[Any] | None
) -> Sequence[Any] | None:
    """Find the amax of tiles that are cut, where parameters changed: one all-reduce a mesh, on the gathers' stream.

    Args:
        after: events that must have completed first. Defaults to all work of the current stream.

    Returns:
        the events that a gather must still wait for.
    """
    by_mesh: dict[Any, list[dbuffer.DBuffer]] = {}  # equal ones of units may have separate process groups
    for group in groups:
        buffer = group.buffer if isinstance(group, OnWireGroup) and group.shares_amax else None
        if buffer is not None and dbuffer.needs_amax(buffer):
            by_mesh.setdefault(buffer.mesh_view, []).append(buffer)
    if not by_mesh:
        return after
    with streams.layer.on(streams.gather, after):
        for buffers in by_mesh.values():
            dbuffer.share_amax(buffers)
    return ()


class OnWireGroup(Group):
    """Parameters are gathered as codes of blocks, and read back."""

    prepare_gathers: ClassVar[Callable[..., Sequence[Any] | None] | None] = staticmethod(share_amax)

    @classmethod
    def takes(cls, param: ManagedParam[Any], policy: QuantizationPolicy) -> bool:
        """Whether a selected parameter is of this kind."""
        return policy.weights is not None

    @classmethod
    def check(cls, param: ManagedParam[Any], request: Request) -> None:
        """Raise ValueError, naming the parameter, if its values cannot be quantized."""
        dtypes, blocks = dtypes_for(param.dtype, request.precision), policy_of(request).blocks
        assert blocks is not None
        check_values(param.name, blocks, (dtypes.kept, dtypes.compute))

    @classmethod
    def lay_out(cls, params: Params, request: Request, dtypes: Dtypes) -> tuple[Layout, WireForm | None]:
        """A layout that cuts no tile, or for `cut="shared"` between any rows."""
        weights = policy_of(request).weights
        assert weights is not None
        layout, shared = cls._cut(params, request, weights)
        return layout, BlocksOnWire(weights, "shared" if shared else "whole")

    @classmethod
    def _cut(cls, params: Params, request: Request, weights: BlockFormat) -> tuple[Layout, bool]:
        """The layout, and whether it may cut tiles."""
        cut = policy_of(request).cut
        if not weights.shares_amax:
            return planned(params, request, ALIGNMENT, 1), False
        if cut == "shared":
            return planned(params, request, ALIGNMENT, 1), True
        whole = planned(params, request, ALIGNMENT, weights.tile[0])
        if cut == "whole":
            return whole, False
        by_rows = planned(params, request, ALIGNMENT, 1)
        bf16 = 2 * sum(segment.shard_size for segment in by_rows.segments)
        row_bytes = CodePlanes(whole, weights).row_bytes
        shared = row_bytes > MOST_OF_BF16 * bf16 and row_bytes > CodePlanes(by_rows, weights).row_bytes
        return (by_rows if shared else whole), shared

    @property
    def shares_amax(self) -> bool:
        """Whether tiles may be cut, so that their amax must be shared."""
        return isinstance(self.plan.wire, BlocksOnWire) and self.plan.wire.cut == "shared"

    @property
    def wire_format(self) -> BlockFormat | None:  # type: ignore[override]
        """The blocks that values are quantized in before a gather."""
        return self.plan.wire.format if isinstance(self.plan.wire, BlocksOnWire) else None

    @property
    def planes(self) -> CodePlanes:
        """Layout of the codes of parameters."""
        wire: Any = self.plan.wire
        return CodePlanes(self.plan.layout, wire.format)

    def begin_gather(self, *, keep_slices: bool) -> None:
        """Also keep codes for a smaller group, if slices will be kept."""
        super().begin_gather(keep_slices=keep_slices)
        assert self.buffer is not None
        self.buffer.keep_codes_for(self.plan.neighbors if keep_slices else None)

    def expect_update(self) -> None:
        """Quantize again before the next gather, even if the version counter does not change."""
        if self.buffer is not None:
            self.buffer.forget_encoding()

    def memory(self) -> GroupMemory:
        """Codes are kept in addition to the shards; each plane of them is gathered before it is read back."""
        values, planes, ranks = super().memory(), self.planes, self.plan.data.shard_size
        values.gather = values.codes = planes.row_bytes
        values.gathered = [ranks * size * self.plan.dtypes.compute.itemsize for size in self.segment_sizes()]
        values.decoding = [*(ranks * nbytes for nbytes in planes.code_bytes), ranks * planes.scale_bytes]
        return values
