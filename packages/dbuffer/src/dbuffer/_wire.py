"""What travels in a gather: a buffer's wire form.

    CastOnWire (today's only one)
      same dtype     shard ----------------------> full        the collective reads the shard itself
      other dtype    shard --cast--> own slice --> full        one kernel, then in place

A form that quantises blocks where they lie, with scales in a small second buffer, is another class with these
methods.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from . import _torch_compat as compat

Flat = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Transfer:
    """One all-gather.

    Attributes:
        send: this rank's part, 1-D, n elements.
        receive: all ranks' parts in rank order, 1-D, world_size * n elements; `send` may be this rank's slice of it.
    """

    send: torch.Tensor
    receive: torch.Tensor


class WireForm(Protocol):
    """How a shard becomes a gathered buffer. One object serves any number of buffers, also at the same time."""

    def dtypes(self, shard: torch.dtype, full: torch.dtype) -> tuple[torch.dtype, ...]:
        """Dtypes that travel, for the 16-byte check. Raises ValueError where this form cannot serve the pair."""
        ...

    def encode(self, shards: Flat, own: Flat, full: Flat) -> list[Transfer]:
        """Before the collective, on the stream it is launched on.

        Args:
            shards: what to send, 1-D, one a segment.
            own: this rank's slices of `full`, one a segment.
            full: the gathered buffers, 1-D, one a segment, memory present.
        """
        ...

    def decode(self, transfers: Sequence[Transfer], full: Flat) -> None:
        """After the collective, on the stream that waits: write `full` from what was received."""
        ...


class CastOnWire:
    """The gathered dtype travels: nothing is copied where dtypes agree, else each element is cast once."""

    def dtypes(self, shard: torch.dtype, full: torch.dtype) -> tuple[torch.dtype, ...]:
        """The gathered buffer's."""
        return (full,)

    def encode(self, shards: Flat, own: Flat, full: Flat) -> list[Transfer]:
        """Send the shards themselves, or their casts in this rank's slices."""
        if shards[0].dtype != full[0].dtype or shards[0].device != full[0].device:
            compat.copy(own, shards, non_blocking=True)
            shards = own
        return [Transfer(send, receive) for send, receive in zip(shards, full, strict=True)]

    def decode(self, transfers: Sequence[Transfer], full: Flat) -> None:
        """Nothing: what arrives is what is computed with."""
