"""Random bits that belong to an element, a step and a rank: a counter-based hash, no generator and no state.

    bits = mix(mix(low + first) ^ second)        low, high: halves of the element's 64-bit index
    first, second                                keys from seed, step and rank, the second also from `high`

The mixer is two rounds of xor-shift and multiplication on 32 bits, so torch and Triton agree. torch's own random
numbers are neither used nor changed.
"""

from dataclasses import dataclass

import torch

MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
GOLDEN = 0x9E3779B9
_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Noise:
    """The key of random bits, which depend on it and on the element's index.

    Args:
        seed, step, rank: any integers; ranks that round contributions to one sum should differ.
    """

    seed: int
    step: int
    rank: int

    def keys(self) -> tuple[int, int]:
        """Two keys of 32 bits."""
        first = mix(self.seed ^ mix(self.step * GOLDEN + 1) ^ mix((self.seed >> 32) + 3))
        second = mix(first + self.rank * GOLDEN + 2)
        return mix(first ^ second * GOLDEN), second


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
    x &= _MASK
    return x - (1 << 32) if x >= 1 << 31 else x


def random_bits(noise: Noise, start: int, numel: int, device: torch.device) -> torch.Tensor:
    """Random bits of `numel` consecutive elements from index `start` on, below 2^63: int32."""
    first, second = noise.keys()
    low = torch.arange(numel, dtype=torch.int32, device=device).add_(signed(start + first))
    _mix(low)
    done = 0
    while done < numel:  # twice where the indices' upper halves differ
        room = min(numel - done, (1 << 32) - (start + done) % (1 << 32))
        low[done : done + room].bitwise_xor_(signed(second ^ mix((start + done >> 32) * GOLDEN)))
        done += room
    _mix(low)
    return low


def _mix(x: torch.Tensor) -> None:
    """`mix` on an int32 tensor, whose products wrap and whose right shifts need their sign bits masked."""
    for shift, multiplier in ((16, MULTIPLIERS[0]), (15, MULTIPLIERS[1]), (16, None)):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << 32 - shift) - 1))
        if multiplier is not None:
            x.mul_(signed(multiplier))
