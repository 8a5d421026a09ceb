"""A checksum of tensors in files that does not depend on who read which bytes: ranks' sums add up to the file's.

A tensor's bytes, padded with zeros, are little-endian words of 64 bits; the sum is that of word i times an odd number
that is mixed from i, modulo 2**64. Any single changed word changes it. It finds damage and mix-ups, not forgery.
"""

import math
import os

from .files import Checkpoint

_PIECE = 1 << 22  # bytes at a time
_ALL = (1 << 64) - 1


def sum_of(data: memoryview, first: int) -> int:
    """The part of a tensor's sum that bytes from number `first` on have in it."""
    total = 0
    for start in range(0, len(data), _PIECE):
        total += _sum_of_piece(data[start : start + _PIECE], first + start)
    return total & _ALL


def _sum_of_piece(data: memoryview, first: int) -> int:
    import numpy as np  # not a dependency of what else this package does

    before = first % 8
    padded = np.zeros(-(-(before + len(data)) // 8) * 8, np.uint8)
    padded[before : before + len(data)] = np.frombuffer(data, np.uint8)
    words = padded.view("<u8")
    mixed = np.arange(first // 8, first // 8 + words.size, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return int((words * (mixed | np.uint64(1))).sum(dtype=np.uint64))


def checksum_safetensors(path: str | os.PathLike[str]) -> dict[str, int]:
    """The checksum of every tensor of a checkpoint, as `load_safetensors(checksum=True)` reports them.

    In one process, which reads all of it; communicates nothing. To write down where a checkpoint is made, and compare
    where it is loaded.

    Args:
        path: a `.safetensors` file, an index, or a folder with either.

    Raises:
        OSError, ValueError: a file is missing or damaged; by name.
    """
    found = {}
    with Checkpoint(path) as checkpoint:
        for stored in checkpoint.tensors.values():
            size = stored.dtype.itemsize
            total, numel = 0, math.prod(stored.shape)
            step = _PIECE // size
            for first in range(0, numel, step):
                piece = bytearray(min(step, numel - first) * size)
                checkpoint.read(stored, first, memoryview(piece))
                total += sum_of(memoryview(piece), first * size)
            found[stored.name] = total & _ALL
        checkpoint.check_unchanged()
    return found
