"""Matrix products on MXFP8 codes, of which a gather moves those that its phase multiplies with.

    forward    y = x W^T    x, W: a scale for 32 elements of a row       gathered: W in rows
    backward   dx = dy W    dy: likewise, W: for 32 of a column          gathered: W in columns
               dW = dy^T x  in the dtype of x

Where backward computes the forward once more (activation checkpointing), both are gathered for it: a forward under
saved-tensor hooks tells. On Blackwell GPUs products are `torch.nn.functional.scaled_mm`, on the CPU as in `scaled`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812

from dbuffer import BlockQuantizedTensor, CodePlanes, PhasesOnWire, WireForm
from layout_planner import Layout
from ragged_shard import multiplies_microscaled

from ... import _torch_compat as compat
from ..._plan.group import Dtypes, GroupMemory, Request
from ..._plan.param import ManagedParam
from ...quantization import MX_COLUMNS, MX_ROWS, QuantizationPolicy
from .on_wire import Params
from .scaled import ScaledOnWireGroup, ScaledWeight, multiply, second_operand

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)


@dataclass(eq=False)
class Phase:
    """Which codes of a group are gathered.

    Attributes:
        forward: whether codes for forward are gathered.
        backward: whether codes for backward are.
        recomputes: whether a forward ran under saved-tensor hooks, so that backward may compute it again.
    """

    forward: bool = True
    backward: bool = False
    recomputes: bool = False


class MicroscaledWeight(ScaledWeight):
    """A matrix of MXFP8 codes in rows, and in columns: whichever are gathered."""

    columns: BlockQuantizedTensor
    phase: Phase

    @classmethod
    def of(
        cls, rows: BlockQuantizedTensor, columns: BlockQuantizedTensor, phase: Phase
    ) -> "MicroscaledWeight":
        """A weight around the codes of both."""
        weight = cls(rows.codes, rows.scales, rows.format, rows.run, rows.shape, rows.dtype)
        assert isinstance(weight, MicroscaledWeight)
        weight.columns, weight.phase = columns, phase
        return weight

    def around(
        self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype | None = None
    ) -> BlockQuantizedTensor:
        """The same weight for its own codes, as torch asks for when it detaches; a tensor of rows for others."""
        if codes is self.codes:
            return self.of(self, self.columns, self.phase)
        return BlockQuantizedTensor(codes, scales, self.format, self.run, self.shape, dtype or self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _COPIES:  # which would read freed memory; every other op reads through `dequantize`
            args[0]._check_forward("copied")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def dequantize(self) -> torch.Tensor:
        """The values of the rows, a plain tensor."""
        self._check_forward("read")
        return super().dequantize()

    def product_with(self, rows: torch.Tensor, transposed: bool) -> torch.Tensor:
        """rows (m, k) times W^T, or `transposed` rows (m, n) times W, in the dtype of the rows.

        Raises:
            RuntimeError: the codes of this phase are not gathered.
        """
        if not transposed:
            self._check_forward("multiplied with")
            if not self.phase.backward and compat.saved_tensor_hooks() is not None:
                self.phase.recomputes = True
        elif not self.phase.backward:
            raise RuntimeError(
                f"a weight of shape {tuple(self.shape)} is multiplied with in backward, and its codes for backward are "
                "not gathered; do not call set_unshard_in_backward(False) with MXFP8 and compute='scaled'"
            )
        native = _native_product if multiplies_microscaled(rows.device) else None
        return multiply(rows, self.columns if transposed else self, MX_ROWS, transposed, native)

    def _check_forward(self, how: str) -> None:
        if not self.phase.forward:
            raise RuntimeError(
                f"a weight of shape {tuple(self.shape)} is {how} in backward, for which only its codes in columns are "
                "gathered; checkpoint activations with use_reentrant=False, or use compute='dequantize'"
            )


def _native_product(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: BlockQuantizedTensor,
    transposed: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The product by one call of torch's, in bf16 where that is the dtype, else in fp32."""
    other, blocks = second_operand(weight, transposed)
    return F.scaled_mm(
        codes.view(torch.float8_e4m3fn),
        other,
        swizzled(scales),
        F.ScalingType.BlockWise1x32,
        swizzled(blocks),
        F.ScalingType.BlockWise1x32,
        F.SwizzleType.SWIZZLE_32_4_4,
        F.SwizzleType.SWIZZLE_32_4_4,
        output_dtype=dtype if dtype == torch.bfloat16 else torch.float32,
    )


def swizzled(scales: torch.Tensor) -> torch.Tensor:
    """e8m0 scales (rows, blocks of a row) as cuBLAS reads them, 1-D: tiles of 128 rows and 4 blocks, padded by zeros.

    In a tile the scales of the rows r, r + 32, r + 64 and r + 96 lie together.
    """
    padded = F.pad(scales, (0, -scales.shape[1] % 4, 0, -scales.shape[0] % 128))
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(torch.float8_e8m0fnu)


class MicroscaledGroup(ScaledOnWireGroup):
    """Parameters are quantized before a gather, which moves the codes of its phase."""

    by_phase: ClassVar[bool] = True

    @classmethod
    def takes(cls, param: ManagedParam[Any], policy: QuantizationPolicy) -> bool:
        """Whether a selected parameter is of this kind."""
        return policy.microscaled and super().takes(param, policy)

    @classmethod
    def check(cls, param: ManagedParam[Any], request: Request) -> None:
        """Raise, naming the parameter, if products cannot be taken with its codes, or codes would be kept."""
        super().check(param, request)
        if request.neighbors is not None:
            raise ValueError(
                f"quantization_policy: parameter {param.name} was selected for MXFP8 with compute='scaled': backward "
                "gathers other codes than forward, so that none are kept for it; use reshard_after_forward=True"
            )

    @classmethod
    def lay_out(cls, params: Params, request: Request, dtypes: Dtypes) -> tuple[Layout, WireForm | None]:
        """A layout that cuts no column's tile, or for `cut="shared"` between any rows."""
        layout, shared = cls._cut(params, request, MX_COLUMNS)
        return layout, PhasesOnWire(MX_ROWS, "shared" if shared else "whole", backward=MX_COLUMNS)

    def _allocate(self) -> None:
        super()._allocate()
        assert self.buffer is not None
        self.phase = Phase()
        columns: Mapping[str, Any] = self.buffer.backward_views
        views: Mapping[str, Any] = self._views
        self._views = {
            name: MicroscaledWeight.of(view, columns[name], self.phase) for name, view in views.items()
        }

    def gather_for(self, *, backward: bool) -> None:
        """Let the next gathers move the codes for forward, or for backward."""
        assert self.buffer is not None
        self.phase.forward = not backward or self.phase.recomputes
        self.phase.backward = backward
        self.buffer.choose_codes(forward=self.phase.forward, backward=backward)

    def memory(self) -> GroupMemory:
        """Codes for backward are kept too. Not counted: where backward recomputes, it gathers both."""
        coded, columns = super().memory(), CodePlanes(self.plan.layout, MX_COLUMNS)
        coded.codes += columns.row_bytes
        return coded
