"""The wire form of a buffer: the encoding of its gathers.

Without one a buffer gathers in the dtype of its gathered memory. `BlocksOnWire` sends codes of blocks, and their scales
in a small second plane. A form is a description that any number of buffers share; `encoder` makes the object for one
buffer.
"""

from typing import Protocol

import torch

from ..memory.gathered import Flats, GatheredMemory
from ..memory.geometry import Geometry
from ..memory.recycler import Recycler

Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # (receive, send), as for a transport


class Encoder:
    """A wire form applied to one buffer."""

    def encode(self, shards: Flats) -> Pairs:
        """Prepare the collective, on the stream that launches it; the gathered memory is allocated.

        Args:
            shards: this rank's slices, 1-D, one a segment.

        Returns:
            (receive, send) pairs: 1-D memory for all ranks' slices in rank order, and this rank's, which may be a view
            of it.
        """
        raise NotImplementedError

    def decode(self) -> bool:
        """Write the gathered memory, on the stream that waits.

        Returns:
            whether it read memory other than the gathered memory, which the launching stream must not reuse earlier.
        """
        raise NotImplementedError

    def retire(self) -> None:
        """Never use this form's memory again: a failed gather may still access it."""

    def release(self) -> None:
        """Free memory used instead of the gathered memory, or by a gather that did not complete."""

    def forget(self) -> None:
        """Invalidate cached codes; the shard may have changed."""


class WireForm(Protocol):
    """How a shard becomes a gathered buffer."""

    def dtypes(self, shard: torch.dtype, gathered: torch.dtype) -> tuple[torch.dtype, ...]:
        """Dtypes of the payload, for the 16-byte check. Raises ValueError if the form does not support the pair."""
        ...

    def encoder(self, geometry: Geometry, gathered: GatheredMemory, recycler: Recycler) -> Encoder:
        """The encoder of one buffer; its memory comes from the recycler."""
        ...
