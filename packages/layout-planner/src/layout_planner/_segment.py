"""One buffer of a layout."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """A buffer of `world_size` equal shards.

    Attributes:
        shard_size: elements that each rank holds.
        names: the tensors in it, in buffer order.
        offsets: where each of them starts, in elements from the start of the buffer.
    """

    shard_size: int
    names: tuple[str, ...]
    offsets: tuple[int, ...]

    def local_range(self, offset: int, numel: int, rank: int) -> tuple[int, int]:
        """The range `[start, stop)` that `rank` holds of a tensor of `numel` elements that starts at `offset`."""
        start, stop = rank * self.shard_size - offset, (rank + 1) * self.shard_size - offset
        return min(max(start, 0), numel), min(max(stop, 0), numel)

    def local_lengths(self, offset: int, numel: int, world_size: int) -> list[int]:
        """How many elements of such a tensor each rank holds."""
        size, lengths = self.shard_size, [0] * world_size
        while numel:
            rank = offset // size
            lengths[rank] = min((rank + 1) * size - offset, numel)
            offset, numel = offset + lengths[rank], numel - lengths[rank]
        return lengths
