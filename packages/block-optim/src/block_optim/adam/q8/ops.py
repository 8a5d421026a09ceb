"""One AdamW step over a matrix of tiles with 8-bit moments, as a list of torch ops.

    codes, scales -> m, r            decode (scratch), with the betas in the scales
    m, v = r^2, g -> m', v'          each product and sum rounded separately, as Triton does without contraction
    m', v' -> r' = root of v', p'    v' / sqrt(v'), since torch's CPU square root is not always rounded correctly
    m', r' -> scales', codes'        the largest of each tile, the nearest code of each number over its scale

Everything is written into scratch that is made once: nothing is allocated.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from block_optim.adam.q8 import codec
from block_optim.adam.q8.codec import FIRST_TOP, SCALE_MAX, SCALE_MIN, SECOND_TOP
from block_optim.core.params import Group
from block_optim.core.rounding import Rounder
from block_optim.core.tiles import Buffer, Stretch, TileScratch
from ragged_shard.device import is_cpu

SQUARE_MIN, SQUARE_MAX = 1e-36, 3e38  # of the second moment: its reciprocal root, and its root, stay finite
GRAD_MAX = 1e19  # of a gradient's magnitude: its square is below SQUARE_MAX, so that moments fit each other
BUFFERS = 4  # m, r and two for the update; two more are for copies


# Scalars of a step are rounded where torch rounds them: it works a float lr through in Python's doubles, a tensor lr in
# the tensor's dtype. Both are done here on the host: products and quotients of fp32 numbers are exact enough in double
# that rounding the double gives what fp32 arithmetic gives.


@dataclass(frozen=True)
class Rates:
    """Factors and divisors of one step; parameters with equal ones share a kernel call. Names as in torch's docs."""

    decay: float | None  # 1 - lr * weight_decay, or None for no decay
    # beta1, beta2, eps: as given
    beta1: float
    beta2: float
    # first, second: 1 - beta1, negative to ascend, and 1 - beta2
    first: float
    second: float
    eps: float
    step_size: float  # lr / (1 - beta1^count)
    root: float  # sqrt(1 - beta2^count), which divides the root of the second moment
    count: float  # number of the step, from 1


def rates_of(group: Group, count: float) -> Rates:
    """The scalars of a group's parameters in step ``count``. A tensor lr is read, and on CUDA waited for."""
    beta1, beta2 = map(float, group["betas"])
    lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
    correction1, correction2 = 1 - beta1**count, 1 - beta2**count
    decay, step_size = 1 - lr * weight_decay, lr / correction1
    if isinstance(group["lr"], Tensor) and group["lr"].dtype == torch.float32:
        step_size = fp32(lr / fp32(correction1))
        decay = fp32(1 - fp32(lr * fp32(weight_decay)))
    first = beta1 - 1 if group["maximize"] else 1 - beta1
    eps, root = float(group["eps"]), correction2**0.5
    return Rates(decay if weight_decay else None, beta1, beta2, first, 1 - beta2, eps, step_size, root, count)


def fp32(value: float) -> float:
    """The nearest fp32 number."""
    return ctypes.c_float(value).value


@dataclass(frozen=True)
class TileTensors:
    """The memory of a matrix of tiles; gradients come with each step."""

    param: Tensor  # (rows, columns)
    codes: tuple[Tensor, Tensor]  # of both moments, (rows, columns) uint8
    scales: tuple[Tensor, Tensor]  # of both moments, (bands of tiles, tiles in a band)
    name: str  # the parameter's, and
    first_element: int  # its index in the global tensor, for stochastic rounding


class TileStep:
    """A prepared step over one matrix of tiles."""

    def __init__(
        self, tensors: TileTensors, stretch: Stretch, scratch: TileScratch, rounder: Rounder | None
    ) -> None:
        self.tensors = tensors
        self.rounder = rounder
        self.buffers = scratch.buffers(stretch)
        height, width = stretch.grid
        self.spread = (height, 1, width, 1)

    def __call__(self, grad: Tensor, rates: Rates) -> None:
        """Update the tiles; ``grad`` is (rows, columns)."""
        first, second, root, update = self.buffers[:BUFFERS]
        wide_param, wide_grad = self.buffers[BUFFERS:]
        if grad.dtype != torch.float32:
            grad = wide_grad.inner.copy_(grad)
        grad = torch.clamp(grad, -GRAD_MAX, GRAD_MAX, out=wide_grad.inner)
        small = update.values[: self.tensors.scales[0].numel()].view(self.tensors.scales[0].shape)
        self._decode(first, second, root, rates, small)
        self._average(first, second, root, grad, rates)
        self._scale(first, second, root, small)
        _root_of(second.values, root.values)
        torch.add(root.values, rates.eps * rates.root, out=update.values)
        update.values.reciprocal_()
        # The root is stored; the second moment's buffer takes the update.
        torch.mul(first.values, rates.step_size * rates.root, out=second.values)
        second.values.mul_(update.values)
        self._write(second, wide_param, rates)
        self._encode(first, root, second, small)

    def _decode(self, first: Buffer, second: Buffer, spare: Buffer, rates: Rates, small: Tensor) -> None:
        """The old moments, times the betas; ``small`` has a cell for each tile."""
        codes, scales, spread = self.tensors.codes, self.tensors.scales, small.view(self.spread)
        codec.decode_first(codes[0], first, spare)
        torch.mul(scales[0], rates.beta1, out=small)
        first.tiles.mul_(spread)
        codec.decode_second(codes[1], second)
        torch.mul(scales[1], rates.beta2**0.5, out=small)
        second.tiles.mul_(spread)
        second.values.mul_(second.values)

    def _average(self, first: Buffer, second: Buffer, spare: Buffer, grad: Tensor, rates: Rates) -> None:
        torch.mul(grad, rates.first, out=spare.inner)
        first.inner.add_(spare.inner)
        torch.mul(grad, grad, out=spare.inner)
        spare.inner.mul_(rates.second)
        second.inner.add_(spare.inner)
        second.values.clamp_(SQUARE_MIN, SQUARE_MAX)

    def _write(self, update: Buffer, wide: Buffer, rates: Rates) -> None:
        param = self.tensors.param
        target = param if param.dtype == torch.float32 else wide.inner.copy_(param)
        if rates.decay is not None:
            target.mul_(rates.decay)
        target.sub_(update.inner)
        if target is param:
            return
        if self.rounder is None:
            param.copy_(target)
            return
        if not target.is_contiguous():
            target = update.values[: param.numel()].view(param.shape).copy_(target)
        name, first = self.tensors.name, self.tensors.first_element
        self.rounder(target.view(-1), param.view(-1), name, round(rates.count), first)

    def _scale(self, first: Buffer, second: Buffer, spare: Buffer, small: Tensor) -> None:
        """The tiles' new scales: of second moments the root of the largest."""
        for buffer, least in ((first, 0.0), (second, SQUARE_MIN)):
            for rest in buffer.padding:
                rest.fill_(least)
        torch.abs(first.values, out=spare.values)
        scales = self.tensors.scales
        torch.amax(spare.tiles, (1, 3), out=scales[0])
        torch.amax(second.tiles, (1, 3), out=scales[1])
        _root_of(scales[1], small)
        scales[1].copy_(small)
        for scale, top in zip(scales, (FIRST_TOP, SECOND_TOP), strict=True):
            scale.mul_(1 / top).clamp_(SCALE_MIN, SCALE_MAX)

    def _encode(self, first: Buffer, second: Buffer, spare: Buffer, small: Tensor) -> None:
        spread = small.view(self.spread)
        for buffer, scale in zip((first, second), self.tensors.scales, strict=True):
            torch.reciprocal(scale, out=small)
            buffer.tiles.mul_(spread)
        codec.encode_first(first, self.tensors.codes[0], spare)
        codec.encode_second(second, self.tensors.codes[1])


def _root_of(square: Tensor, out: Tensor) -> None:
    """square / sqrt(square): the same bits on every CPU, and as in Triton.

    On CPU `torch.rsqrt` is 1 / sqrt, both rounded correctly, while `torch.sqrt` may be MKL's, which is not; on CUDA it
    is the other way round.
    """
    if is_cpu(square.device):
        torch.rsqrt(square, out=out)
    else:
        torch.sqrt(square, out=out)
        torch.reciprocal(out, out=out)
    out.mul_(square)
