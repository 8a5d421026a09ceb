"""Weights narrower than fp32: every step computes with fp32 copies of them and rounds once, when it writes them back.

    none                       to nearest: small changes of weights are lost
    stochastic_rounding        up or down at random, right on average; bf16 weights only

fp32 weights that are computed with in bf16 (`MixedPrecisionPolicy`) lose nothing. Nothing here communicates.

Random bits belong to an element, not to a rank or a call:

    bits      = hash(step, parameter's name; element's index in the global tensor, modulo 2**32)        16 bits
    rounded   = (fp32's bits + these) with its lowest 16 cleared
    NaN       = its sign and upper 16 bits, quiet; nothing is added, which could make it infinity or zero

so a number between two bf16 neighbours goes to the upper one with the probability of its place between them, and the
same weights and updates give the same bits however tensors are cut. The hash is a 32-bit integer mixer (xor-shifts and
multiplications) of the index, to which one key is added and another xored; the bits are the upper half of its last
product. Integer arithmetic, so torch and Triton agree.
"""

import functools
import hashlib
from collections.abc import Sequence

import torch

from block_optim.core.options import check_flag
from block_optim.core.params import Group, Param
from block_optim.core.scratch import per_device

MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
GOLDEN = 0x9E3779B9
INFINITY, QUIET = 0x7F800000, 0x400000  # in fp32's bits: NaN is above the first
CHUNK, ACCELERATOR_CHUNK = 1 << 18, 1 << 22  # elements rounded together
_MASK = 0xFFFFFFFF


def keys_of(name: str, step: int) -> tuple[int, int]:
    """Two 32-bit keys for a parameter and a step."""
    first, second = base_keys(name)
    return (first + step * GOLDEN) & _MASK, second ^ mix(step)


@functools.cache
def base_keys(name: str) -> tuple[int, int]:
    """The part of the keys that depends on the name."""
    digest = hashlib.blake2b(f"0/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def mix(x: int) -> int:
    """The mixer on a Python integer."""
    x &= _MASK
    x ^= x >> 16
    x = x * MULTIPLIERS[0] & _MASK
    x ^= x >> 15
    x = x * MULTIPLIERS[1] & _MASK
    return x ^ x >> 16


def signed(x: int) -> int:
    """An unsigned 32-bit number as torch's int32 holds it."""
    return x - (1 << 32) if x >= 1 << 31 else x


class Rounder:
    """Rounds stretches of one device, ``numel`` elements at a time, or fewer; its buffers are made once."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.numel = min(numel, per_device(device, cpu=CHUNK, accelerator=ACCELERATOR_CHUNK))
        self._count = torch.arange(self.numel, dtype=torch.int32, device=device)
        self._hash, self._spare = torch.empty_like(self._count), torch.empty_like(self._count)

    def __call__(self, wide: torch.Tensor, out: torch.Tensor, name: str, step: int, start: int) -> None:
        """Round ``wide`` (1-D fp32, overwritten) into ``out`` (bf16); ``start`` is the first element's global index."""
        while wide.numel():
            n = min(wide.numel(), self.numel)
            self._round(wide[:n], out[:n], name, step, start)
            wide, out, start = wide[n:], out[n:], start + n

    def _round(self, wide: torch.Tensor, out: torch.Tensor, name: str, step: int, start: int) -> None:
        n, bits = wide.numel(), wide.view(torch.int32)
        x, spare = self._hash[:n], self._spare[:n]
        first, second = keys_of(name, step)
        torch.add(self._count[:n], signed(start + first & _MASK), out=x).bitwise_xor_(signed(second))
        for shift, multiplier in ((16, MULTIPLIERS[0]), (15, MULTIPLIERS[1])):
            _shift(x, shift, out=spare)
            x.bitwise_xor_(spare).mul_(signed(multiplier))
        _shift(x, 16, out=x)
        torch.bitwise_and(bits, 0x7FFFFFFF, out=spare).le_(INFINITY).neg_()  # 0 for NaN, else all ones
        bits.add_(x.bitwise_and_(spare))
        bits.bitwise_or_(spare.bitwise_not_().bitwise_and_(QUIET)).bitwise_and_(-0x10000)
        out.copy_(wide)


def _shift(x: torch.Tensor, by: int, *, out: torch.Tensor) -> None:
    """An unsigned right shift of int32, whose own copies the sign."""
    torch.bitwise_right_shift(x, by, out=out).bitwise_and_((1 << 32 - by) - 1)


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether weights of this dtype are worked on in fp32 copies."""
    return dtype.itemsize < 4


def check_precision(group: Group, params: Sequence[Param]) -> None:
    """Raise ValueError if a group's options of rounding do not fit a parameter, which is named."""
    check_flag("stochastic_rounding", group["stochastic_rounding"])
    for param in params if group["stochastic_rounding"] else ():
        if not is_narrow(param.dtype):
            continue
        if param.dtype != torch.bfloat16:
            raise ValueError(
                f"{param.name}: stochastic_rounding is for bf16 parameters, this one is {param.dtype}; round to "
                "nearest in its group"
            )
        if not param.holding.in_runs or not param.local.is_contiguous():
            raise ValueError(
                f"{param.name}: stochastic_rounding needs the elements of a rank to be one contiguous run of the "
                f"tensor, it has placements {param.placements} and stride {param.local.stride()}; round to "
                "nearest in its group"
            )


class NarrowWriter:
    """Writes fp32 copies back into narrow weights, rounded by the options of each parameter's group."""

    def __init__(self) -> None:
        self._rounders: dict[torch.device, Rounder] = {}

    def __call__(self, param: Param, wide: torch.Tensor, weight: torch.Tensor, first: int, step: int) -> None:
        """Round ``wide`` (1-D, lost) into ``weight``: this rank's elements from ``first`` on."""
        if not param.group.get("stochastic_rounding") or param.dtype != torch.bfloat16:
            weight.copy_(wide)
            return
        assert param.start is not None
        if weight.device not in self._rounders:
            self._rounders[weight.device] = Rounder(CHUNK, weight.device)
        self._rounders[weight.device](wide, weight, param.name, step, param.start + first)
