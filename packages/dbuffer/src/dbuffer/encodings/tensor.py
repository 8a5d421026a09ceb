"""A tensor that is codes and scales: the form at rest of a weight that is not trained."""

from collections.abc import Sequence
from typing import Any

import torch

from .. import _torch_compat as compat
from .formats import VALUES, BlockFormat
from .tiles import RowRun

aten = torch.ops.aten
_SAME = (aten.detach.default, aten.alias.default)
_MOVED = (aten.clone.default, aten._to_copy.default, aten.empty_like.default)


class BlockQuantizedTensor(torch.Tensor):
    """Rows of a tensor as codes and scales, with the shape and dtype of their values; on meta without memory.

    `copy_` quantizes values (codes of this format are copied as they are), and so does nothing else: any other op that
    writes to it raises. `detach`, `clone`, `empty_like` and `to` return such tensors, `to` another dtype of the
    values. Every other op reads the values back first. Communicates nothing.

    Args:
        codes: uint8, 1-D: of the run's rows.
        scales: fp32, 1-D: of the run's tiles.
        run: the rows of the whole tensor, counted from the start of codes and scales.
        shape, dtype: of the values; fp32, bf16 or fp16.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    format: BlockFormat
    run: RowRun
    __torch_function__ = compat.no_torch_function

    @staticmethod
    def __new__(
        cls,
        codes: torch.Tensor,
        scales: torch.Tensor,
        format: BlockFormat,
        run: RowRun,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> "BlockQuantizedTensor":
        """A wrapper of codes and scales, which it shares."""
        made: BlockQuantizedTensor = compat.new_wrapper(cls, tuple(shape), dtype, codes.device)
        made.codes, made.scales, made.format, made.run = codes, scales, format, run
        return made

    def dequantize(self) -> torch.Tensor:
        """The values, a plain tensor."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        if not self.is_meta:
            self.format.dequantize([self.run], self.codes, self.scales, out.view(-1))
        return out

    def around(
        self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype | None = None
    ) -> "BlockQuantizedTensor":
        """A tensor like this one around other codes and scales."""
        return type(self)(codes, scales, self.format, self.run, self.shape, dtype or self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SAME or (func is aten.view.default and tuple(args[1]) == tuple(args[0].shape)):
            return args[0].around(args[0].codes, args[0].scales)
        if func in _MOVED:
            return _moved(func, args[0], dict(kwargs))
        if func is aten.copy_.default and isinstance(args[0], cls):
            return _copied(args[0], args[1])
        for written in compat.written_by(func, args, kwargs):
            if isinstance(written, cls):
                raise RuntimeError(
                    f"{func} would change a weight of shape {tuple(written.shape)} that is kept as codes of "
                    f"{written.format}, not as values; copy_ or load_state_dict quantize new values, and weights that "
                    "are trained must not be quantized at rest"
                )
        values = compat.tree_map_only(BlockQuantizedTensor, BlockQuantizedTensor.dequantize, (args, kwargs))
        return func(*values[0], **values[1])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"BlockQuantizedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, format={self.format})"

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        state = (self.codes, self.scales, self.format, self.run, tuple(self.shape), self.dtype)
        return (type(self), state)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], (self.format, self.run, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> "BlockQuantizedTensor":
        format, run, dtype = context
        return cls(inner["codes"], inner["scales"], format, run, outer_size, dtype)


def _moved(func: Any, tensor: BlockQuantizedTensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """Codes copied, or new ones without content, on another device and for values of another dtype if asked."""
    dtype = kwargs.pop("dtype", None) or tensor.dtype
    kwargs.pop("memory_format", None)
    kwargs.pop("layout", None)
    if dtype not in VALUES:
        raise ValueError(f"a weight that is kept as codes of {tensor.format} has no values in {dtype}")
    return tensor.around(func(tensor.codes, **kwargs), func(tensor.scales, **kwargs), dtype)


def _copied(to: BlockQuantizedTensor, source: Any) -> BlockQuantizedTensor:
    """Take codes as they are, or quantize values."""
    if to.is_meta:
        return to
    coded = isinstance(source, BlockQuantizedTensor)
    if coded and (source.format, source.run) == (to.format, to.run):
        to.codes.copy_(source.codes)
        to.scales.copy_(source.scales)
    else:
        values = source.dequantize() if coded else source
        dtype = values.dtype if values.dtype in VALUES else torch.float32
        values = values.to(to.device, dtype).expand(to.shape).contiguous()
        to.format.quantize([to.run], values.view(-1), to.codes, to.scales)
    torch.autograd.graph.increment_version([to.codes, to.scales])  # below autograd torch does not count
    return to
