"""Boxes of row-major tensors: in pieces that fit into memory, and as runs of a file. Arithmetic only."""

import itertools
import math
from collections.abc import Iterator

from ragged_shard import Box

Ints = tuple[int, ...]


def whole(shape: Ints) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), shape)


def pieces_of(box: Box, most: int) -> Iterator[Box]:
    """The box in row-major pieces of at most `most` elements (one row, where the rest of the box is larger)."""
    if box.numel <= most or not box.sizes:
        yield box
        return
    dim = next((d for d, size in enumerate(box.sizes) if size > 1), 0)
    step = max(1, most * box.sizes[dim] // box.numel)
    for start in range(0, box.sizes[dim], step):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim] += start
        sizes[dim] = min(step, box.sizes[dim] - start)
        piece = Box(tuple(offsets), tuple(sizes))
        if step == 1 and piece.numel > most:
            yield from pieces_of(piece, most)
        else:
            yield piece


def runs_of(shape: Ints, box: Box) -> Iterator[tuple[int, int]]:
    """The box as runs `(first element, length)` of the flattened tensor, the fewest, in order.

    shape (4, 5), rows 1-2, columns 0-4: one run of 10        columns 1-3: two runs of 3
    """
    if box.numel == 0:
        return
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    inner = len(shape)
    while inner and box.sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)  # the last dimension that is cut still belongs to a run
    length = math.prod(box.sizes[inner:])
    first = sum(o * s for o, s in zip(box.offsets[inner:], strides[inner:], strict=True))
    outer = [range(o, o + n) for o, n in zip(box.offsets[:inner], box.sizes[:inner], strict=True)]
    for index in itertools.product(*outer):
        yield first + sum(i * s for i, s in zip(index, strides[:inner], strict=True)), length
