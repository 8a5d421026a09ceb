"""Boxes of row-major tensors, in pieces that fit into memory. Arithmetic only."""

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
