"""Pieces: a rank's elements of a tensor, as runs of the flattened tensor at equal distances. No tensors except views.

    tensor (4, 6), flattened           this rank holds columns 3-5 of rows 1-3

      .  .  .  .  .  .                 Piece(first=9, rows=3, width=3, stride=6, local=0)
      .  .  .  a  b  c
      .  .  .  d  e  f                 its local memory: a b c d e f g h i
      .  .  .  g  h  i

A run of the flattened tensor is a piece of one row. A box has one piece, unless three of its dimensions are cut.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Piece:
    """`rows` runs of `width` elements each."""

    first: int  # the first element, in the flattened tensor
    # rows, width: how many runs, of how many elements
    rows: int
    width: int
    stride: int  # from the beginning of a run to the next one's; of one run its width
    local: int  # its first element among the rank's; all runs are consecutive there

    @property
    def numel(self) -> int:
        """Elements."""
        return self.rows * self.width

    @property
    def stop(self) -> int:
        """The element after the last one, in the flattened tensor."""
        return self.first + (self.rows - 1) * self.stride + self.width

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a view of the piece; 1-D if the piece is a single run."""
        return (self.width,) if self.rows == 1 else (self.rows, self.width)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """A view of its elements in the flattened tensor, which is contiguous."""
        if self.rows == 1:
            return flat[self.first : self.first + self.width]
        offset = int(flat.storage_offset()) + self.first
        return flat.as_strided((self.rows, self.width), (self.stride, 1), offset)

    def here(self, local: torch.Tensor) -> torch.Tensor:
        """A view of its elements in the rank's memory, flattened; of the same shape as the other view."""
        return local[self.local : self.local + self.numel].view(self.shape)

    def moved(self, by: int) -> "Piece":
        """The same piece of a tensor that begins ``by`` elements earlier."""
        return replace(self, first=self.first + by)

    def within(self, start: int, stop: int) -> list["Piece"]:
        """Its intersection with elements [start, stop): at most three pieces, in the order of the local memory."""
        low = max(0, (start - self.first - self.width) // self.stride + 1)
        high = min(self.rows, -(-(stop - self.first) // self.stride))
        head = tail = None
        if low < high:
            head = self._clipped(low, start, stop)
            low += head is not None
        if low < high:
            tail = self._clipped(high - 1, start, stop)
            high -= tail is not None
        body = self._runs(low, high - low) if low < high else None
        return [piece for piece in (head, body, tail) if piece is not None]

    def _clipped(self, row: int, start: int, stop: int) -> "Piece | None":
        """The part of one run in elements [start, stop), if that is not all of it."""
        first = self.first + row * self.stride
        low, high = max(first, start), min(first + self.width, stop)
        if high - low == self.width:
            return None
        return Piece(low, 1, high - low, high - low, self.local + row * self.width + low - first)

    def _runs(self, row: int, count: int) -> "Piece":
        stride = self.stride if count > 1 else self.width
        return Piece(self.first + row * self.stride, count, self.width, stride, self.local + row * self.width)


def run(start: int, stop: int) -> tuple[Piece, ...]:
    """Elements [start, stop) as pieces: one, or none where there is nothing."""
    return (Piece(start, 1, stop - start, stop - start, 0),) if stop > start else ()


def pieces_of(
    boxes: Iterable[tuple[Sequence[int], Sequence[int]]], shape: Sequence[int]
) -> tuple[Piece, ...]:
    """The pieces of boxes, (offsets, sizes), of a tensor; what continues the piece before is part of that.

    Boxes are in the order of the local memory, and none is empty.
    """
    result: list[Piece] = []
    local = 0
    for offsets, sizes in boxes:
        for piece in _pieces_of_box(offsets, sizes, shape, local):
            local += piece.numel
            last = result[-1] if result else None
            if last is not None and last.rows == piece.rows == 1 and last.stop == piece.first:
                width = last.width + piece.width
                result[-1] = Piece(last.first, 1, width, width, last.local)
            else:
                result.append(piece)
    return tuple(result)


def _pieces_of_box(
    offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int], local: int
) -> Iterator[Piece]:
    """A piece for each index of the dimensions outside the two innermost ones that are cut."""
    cut = [dim for dim, (size, all_of_it) in enumerate(zip(sizes, shape, strict=True)) if size != all_of_it]
    inner = cut[-1] if cut else 0
    outer = cut[-2] if len(cut) > 1 else 0
    width, stride = math.prod(sizes[inner:]), math.prod(shape[inner:])
    rows = math.prod(sizes[outer:inner])
    for index in itertools.product(*(range(o, o + n) for o, n in zip(offsets, sizes[:outer], strict=False))):
        first = _flat_offset((*index, *offsets[outer:]), shape)
        yield Piece(first, rows, width, stride if rows > 1 else width, local)
        local += rows * width


def _flat_offset(index: Sequence[int], shape: Sequence[int]) -> int:
    """Index of an element in the row-major flattened tensor."""
    offset = 0
    for i, size in zip(index, shape, strict=True):
        offset = offset * size + i
    return offset
