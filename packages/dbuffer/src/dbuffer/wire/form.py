"""What travels in a gather: a buffer's wire form.

    CastOnWire
      same dtype     shard ----------------------> gathered        the collective reads the shard itself
      other dtype    shard --cast--> own slice --> gathered        one kernel, then in place

A form that quantizes blocks where they lie, with scales in a small second plane, is another class with these
methods. A form is a description that any number of buffers share; `encoder` makes the object that serves one.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from .. import _torch_compat as compat
from ..memory.gathered import Flats, GatheredMemory
from ..memory.geometry import Geometry
from ..memory.recycler import Recycler


@dataclass(frozen=True, slots=True)
class Transfer:
    """One all-gather.

    Attributes:
        send: this rank's slice, 1-D, n elements.
        receive: the slices of all ranks in their order, 1-D, world_size * n elements; `send` may lie in it.
    """

    send: torch.Tensor
    receive: torch.Tensor


class Encoder(Protocol):
    """A wire form at work on one buffer."""

    def encode(self, shards: Flats) -> list[Transfer]:
        """Before the collective, on the stream that launches it; the gathered memory is present.

        Args:
            shards: this rank's slices, 1-D, one a segment.
        """
        ...

    def decode(self) -> bool:
        """After the collective, on the stream that waits: write the gathered memory.

        Returns:
            whether it read memory other than the gathered memory, which the launching stream must not reuse earlier.
        """
        ...


class WireForm(Protocol):
    """How a shard becomes a gathered buffer."""

    def dtypes(self, shard: torch.dtype, gathered: torch.dtype) -> tuple[torch.dtype, ...]:
        """Dtypes that travel, for the 16-byte check. Raises ValueError where this form cannot serve the pair."""
        ...

    def encoder(self, geometry: Geometry, gathered: GatheredMemory, recycler: Recycler) -> Encoder:
        """The object that serves one buffer; what memory it needs comes from the recycler."""
        ...


@dataclass(frozen=True)
class CastOnWire:
    """The gathered dtype travels: nothing is copied where dtypes agree, else each element is cast once."""

    def dtypes(self, shard: torch.dtype, gathered: torch.dtype) -> tuple[torch.dtype, ...]:
        """The gathered buffer's."""
        return (gathered,)

    def encoder(self, geometry: Geometry, gathered: GatheredMemory, recycler: Recycler) -> Encoder:
        """One that needs no memory."""
        return _Cast(gathered)


class _Cast:
    def __init__(self, gathered: GatheredMemory) -> None:
        self._own, self._raw = gathered.own, gathered.raw
        self._cast = [
            Transfer(send, receive) for send, receive in zip(gathered.own, gathered.raw, strict=True)
        ]

    def encode(self, shards: Flats) -> list[Transfer]:
        """Send the shards themselves, or their casts in this rank's slices."""
        own = self._own[0]
        if shards[0].dtype == own.dtype and shards[0].device == own.device:
            return [Transfer(send, receive) for send, receive in zip(shards, self._raw, strict=True)]
        compat.copy(self._own, shards, non_blocking=True)
        return self._cast

    def decode(self) -> bool:
        """Nothing: what arrives is what is computed with."""
        return False
