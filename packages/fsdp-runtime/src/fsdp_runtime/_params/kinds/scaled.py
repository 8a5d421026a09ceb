"""Matrix products on codes: what `compute="scaled"` puts in the place of a linear layer's weight.

    forward     y = x W^T + b    x: e4m3, one scale for 128 elements of a row    W: codes and scales as gathered
    backward    dx = dy W        dy: likewise                                    W: the same codes, transposed
                dW = dy^T x      in the dtype of x
                db = sum of dy

Sums are in fp32. On a device that `multiplies_blocks` both products are `torch.nn.functional.scaled_mm`. On the CPU the
numbers that codes stand for are multiplied, those of W for one band of 128 rows at a time: the same terms, for tests.
A product ends a graph of torch.compile.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from dbuffer import BlockFP8, BlockQuantizedTensor, RowRun, RunList, num_gathered_scales
from ragged_shard import multiplies_blocks

from ..._plan.group import GroupMemory, Request
from ..._plan.param import ManagedParam
from ...quantization import TILE, QuantizationPolicy, check_products
from .at_rest import AtRestGroup
from .on_wire import OnWireGroup, policy_of

_ROWS = 16  # scaled_mm gets multiples of this many rows


class ScaledWeight(BlockQuantizedTensor):
    """A matrix of e4m3 codes in tiles of 128x128. `F.linear` multiplies with the codes; other ops read values back."""

    def product_with(self, rows: torch.Tensor, transposed: bool) -> torch.Tensor:
        """rows (m, k) times W^T, or `transposed` rows (m, n) times W, in the dtype of the rows."""
        assert isinstance(self.format, BlockFP8)
        native = _scaled_product if multiplies_blocks(rows.device) else None
        return multiply(rows, self, BlockFP8((1, TILE), self.format.scale), transposed, native)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            arguments = _arguments(*args, **(kwargs or {}))
            if arguments is not None:
                return _linear()(*arguments)
        return super().__torch_function__(func, types, args, kwargs or {})


def _arguments(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    """The operands, cast as autocast asks, or None if torch should compute the product, or refuse it."""
    if not isinstance(weight, ScaledWeight) or isinstance(input, BlockQuantizedTensor):
        return None
    kind = input.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        input = input.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    elif input.dtype != weight.dtype:
        return None
    fits = input.dim() > 0 and input.shape[-1] == weight.shape[1] and input.device == weight.device
    return (input, weight, bias) if fits else None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: ScaledWeight, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows if weight.requires_grad else None, weight)
        y = weight.product_with(rows, transposed=False)
        if bias is not None:
            y += bias
        return y.view(*x.shape[:-1], y.shape[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        dy = grad.reshape(-1, grad.shape[-1])
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = weight.product_with(dy, transposed=True).view(*grad.shape[:-1], weight.shape[1])
        if ctx.needs_input_grad[1]:
            dw = (dy.t() @ rows).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            db = dy.sum(0)
        return dx, dw, db


@functools.cache  # torch.compiler takes seconds to import
def _linear() -> Any:
    return torch.compiler.disable(_Linear.apply)


def multiply(
    rows: torch.Tensor,
    weight: BlockQuantizedTensor,
    fmt: BlockFP8,
    transposed: bool,
    native: Callable[..., torch.Tensor] | None,
) -> torch.Tensor:
    """rows (m, k), quantized in a format, times W^T, or `transposed` rows (m, n) times W, in the dtype of the rows.

    Args:
        native: `(codes, scales, weight, transposed, dtype) -> product`, by torch; None: the values are multiplied.
    """
    count, columns = rows.shape
    if count == 0:
        return rows.new_zeros(0, weight.shape[1 if transposed else 0])
    if native is not None:
        codes, scales = _quantize(rows, fmt, -count % _ROWS)
        return native(codes, scales, weight, transposed, rows.dtype)[:count].to(rows.dtype)
    codes, scales = _quantize(rows, fmt, 0)
    values = torch.empty(rows.shape, device=rows.device)
    fmt.dequantize(_runs(fmt, count, columns), codes.view(-1), scales.view(-1), values.view(-1))
    return _product_of_values(values, weight, transposed).to(rows.dtype)


@functools.lru_cache(maxsize=256)  # what kernels need to know of them is worked out once
def _runs(fmt: BlockFP8, rows: int, columns: int) -> RunList:
    return RunList([RowRun(fmt.grid((rows, columns)), 0, rows)])


def _quantize(rows: torch.Tensor, fmt: BlockFP8, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (m + padding, k), of zeros in the padding, and scales (m + padding, tiles)."""
    count, columns = rows.shape
    codes = torch.empty((count + padding, columns), dtype=torch.uint8, device=rows.device)
    scales = torch.empty((count + padding, -(-columns // fmt.tile[1])), device=rows.device)
    if padding:
        codes[count:] = 0
        scales[count:] = 1
    fmt.quantize(_runs(fmt, count, columns), rows.contiguous().view(-1), codes.view(-1), scales.view(-1))
    return codes, scales


def second_operand(weight: BlockQuantizedTensor, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """W^T, or `transposed` W, e4m3 with the sum along memory, as torch asks; and its scales, along the sum."""
    matrix = weight.codes.view(weight.shape)
    scales = weight.scales.view(-1, weight.run.grid.across)
    if transposed:
        matrix, scales = matrix.t().contiguous(), scales.t()
    return matrix.view(torch.float8_e4m3fn).t(), scales


def _scaled_product(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: BlockQuantizedTensor,
    transposed: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The product by one call of torch's, in bf16 where that is the dtype, else in fp32."""
    other, tiles = second_operand(weight, transposed)
    # Scales run along the sum too, those of tiles padded to four.
    padded = torch.cat((tiles, tiles.new_zeros(tiles.shape[0], -tiles.shape[1] % 4)), dim=1)
    return F.scaled_mm(
        codes.view(torch.float8_e4m3fn),
        other,
        scales.t().contiguous().t(),
        F.ScalingType.BlockWise1x128,
        padded.t(),
        F.ScalingType.BlockWise128x128,
        output_dtype=dtype if dtype == torch.bfloat16 else torch.float32,
    )


def _product_of_values(rows: torch.Tensor, weight: BlockQuantizedTensor, transposed: bool) -> torch.Tensor:
    """The product in fp32, with the values of one band of the weight's tiles at a time."""
    count, columns = weight.shape
    grid = weight.run.grid
    product = torch.zeros(rows.shape[0], columns if transposed else count, device=rows.device)
    band = torch.empty(TILE * columns, device=rows.device)
    for start in range(0, count, TILE):
        stop = min(start + TILE, count)
        run = RowRun(grid, start, stop, codes=start * columns, scales=grid.scales_of(start, stop)[0])
        weight.format.dequantize([run], weight.codes, weight.scales, band)
        values = band[: run.numel].view(-1, columns)
        if transposed:
            product.addmm_(rows[:, start:stop], values)
        else:
            torch.mm(rows, values.t(), out=product[:, start:stop])
    return product


class _Scaled(OnWireGroup):
    """Gathered weights stay codes, with which products are taken."""

    read_back = False

    @classmethod
    def takes(cls, param: ManagedParam[Any], policy: QuantizationPolicy) -> bool:
        """Whether a selected parameter is of this kind."""
        return policy.scaled and super().takes(param, policy)

    @classmethod
    def check(cls, param: ManagedParam[Any], request: Request) -> None:
        """Raise, naming the parameter, if products cannot be taken with its codes. See `check_products`."""
        super().check(param, request)
        uses = [(place.module, place.attribute) for place in param.places]
        check_products(param.name, param.shape, uses, request.data.device, policy_of(request).blocks)
        if param.other is not None:
            raise ValueError(
                f"quantization_policy: parameter {param.name} was selected for compute='scaled', and another "
                "parallelism has cut it; use compute='dequantize'"
            )

    def _allocate(self) -> None:
        super()._allocate()
        views: Mapping[str, Any] = self._views
        self._views = {
            name: ScaledWeight(v.codes, v.scales, v.format, v.run, v.shape, v.dtype)
            for name, v in views.items()
        }
        self._one_a_segment = []

    def held_by_autograd(self) -> bool:
        """True: uses by saved tensor subclasses are not visible."""
        return True

    def memory(self) -> GroupMemory:
        """Gathered codes stay, and the scales of each tensor."""
        coded = super().memory()
        *codes, scales = coded.decoding
        coded.gathered, coded.decoding = [*codes, 4 * num_gathered_scales(self.planes)], [scales]
        return coded


class ScaledOnWireGroup(_Scaled):
    """Parameters are quantized before a gather, and stay codes."""


class ScaledAtRestGroup(_Scaled, AtRestGroup):
    """Parameters are kept as codes, also while they are gathered."""
