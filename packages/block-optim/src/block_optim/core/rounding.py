"""Stochastic rounding of fp32 to bf16 with random bits that belong to an element, not to a rank or a call.

    bits      = hash(seed, step, parameter's name; element's index in the global tensor, modulo 2**32)        16 bits
    rounded   = (fp32's bits + these) with its lowest 16 cleared
    NaN       = its sign and upper 16 bits, quiet; nothing is added, which could make it infinity or zero

so a number between two bf16 neighbours goes to the upper one with the probability of its place between them, and the
same run gives the same bits however tensors are cut. The hash is a 32-bit integer mixer (xor-shifts and
multiplications) of the index, to which one key is added and another xored; the bits are the upper half of its last
product. Integer arithmetic, so torch and Triton agree.
"""

import functools
import hashlib
from collections.abc import Sequence

import torch

from block_optim.core._torch_compat import foreach_copy_
from block_optim.core.device import per_device

MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
GOLDEN = 0x9E3779B9
INFINITY, QUIET = 0x7F800000, 0x400000  # in fp32's bits: NaN is above the first
CHUNK, ACCELERATOR_CHUNK = 1 << 18, 1 << 22  # elements rounded together
_MASK = 0xFFFFFFFF


def keys_of(seed: int, name: str, step: int) -> tuple[int, int]:
    """Two 32-bit keys for a parameter and a step."""
    first, second = base_keys(seed, name)
    return (first + step * GOLDEN) & _MASK, second ^ mix(step)


@functools.cache
def base_keys(seed: int, name: str) -> tuple[int, int]:
    """The part of the keys that depends on seed and name."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
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

    def __call__(
        self, wide: torch.Tensor, out: torch.Tensor, seed: int, name: str, step: int, start: int
    ) -> None:
        """Round ``wide`` (1-D fp32, overwritten) into ``out`` (bf16); ``start`` is the first element's global index."""
        while wide.numel():
            n = min(wide.numel(), self.numel)
            self.each(wide[:n], [out[:n]], seed, step, [(name, start)])
            wide, out, start = wide[n:], out[n:], start + n

    def each(
        self,
        wide: torch.Tensor,
        outs: Sequence[torch.Tensor],
        seed: int,
        step: int,
        places: Sequence[tuple[str, int]],
    ) -> None:
        """Round stretches that follow each other in ``wide``, at most ``numel``; ``places``: their names and starts."""
        n, bits = wide.numel(), wide.view(torch.int32)
        spare = self._spare[:n]
        x = self.random_bits(seed, step, places, [out.numel() for out in outs])
        torch.bitwise_and(bits, 0x7FFFFFFF, out=spare).le_(INFINITY).neg_()  # 0 for NaN, else all ones
        bits.add_(x.bitwise_and_(spare))
        bits.bitwise_or_(spare.bitwise_not_().bitwise_and_(QUIET)).bitwise_and_(-0x10000)
        foreach_copy_(outs, wide.split([out.numel() for out in outs]))

    def random_bits(
        self, seed: int, step: int, places: Sequence[tuple[str, int]], lengths: Sequence[int]
    ) -> torch.Tensor:
        """16 random bits (int32) for each element of stretches of these lengths, at most ``numel`` together.

        The next call overwrites them.
        """
        n = sum(lengths)
        x, spare = self._hash[:n], self._spare[:n]
        for part, (name, start) in zip(x.split(list(lengths)), places, strict=True):
            first, second = keys_of(seed, name, step)
            torch.add(self._count[: len(part)], signed(start + first & _MASK), out=part)
            part.bitwise_xor_(signed(second))
        for shift, multiplier in ((16, MULTIPLIERS[0]), (15, MULTIPLIERS[1])):
            _shift(x, shift, out=spare)
            x.bitwise_xor_(spare).mul_(signed(multiplier))
        _shift(x, 16, out=x)
        return x


def _shift(x: torch.Tensor, by: int, *, out: torch.Tensor) -> None:
    """An unsigned right shift of int32, whose own copies the sign."""
    torch.bitwise_right_shift(x, by, out=out).bitwise_and_((1 << 32 - by) - 1)
