"""N-d boxes of row-major tensors: what a rank holds of one, and which bytes of a file that is. Arithmetic only."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """Elements `offsets[d] ... offsets[d] + sizes[d]` along each dimension d."""

    offsets: Ints
    sizes: Ints

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def slices(self, origin: Ints) -> tuple[slice, ...]:
        """The box as an index into a tensor whose first element is at `origin`."""
        return tuple(
            slice(o - at, o - at + size) for o, at, size in zip(self.offsets, origin, self.sizes, strict=True)
        )

    def intersection(self, other: "Box") -> "Box | None":
        """The elements that both have, or None."""
        offsets, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            if start >= stop:
                return None
            offsets.append(start)
            sizes.append(stop - start)
        return Box(tuple(offsets), tuple(sizes))


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
