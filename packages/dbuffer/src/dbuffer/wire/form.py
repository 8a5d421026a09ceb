"""What travels in a gather: a buffer's wire form.

    CastOnWire
      same dtype     shard ----------------------> gathered        the collective reads the shard itself
      other dtype    shard --cast--> own slice --> gathered        one kernel, then in place

`BlocksOnWire` sends codes of blocks instead, and their scales in a small second plane. A form is a description that
any number of buffers share; `encoder` makes the object that serves one.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from .. import _torch_compat as compat
from ..memory.gathered import Flats, GatheredMemory
from ..memory.geometry import Geometry
from ..memory.recycler import Recycler

Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # (receive, send), as for a transport


class Encoder(Protocol):
    """A wire form at work on one buffer.

    Attributes:
        decodes: whether `decode` does anything.
    """

    decodes: bool

    def encode(self, shards: Flats) -> Pairs:
        """Before the collective, on the stream that launches it; the gathered memory is present.

        Args:
            shards: this rank's slices, 1-D, one a segment.

        Returns:
            what to gather: where all ranks' slices go in their order, 1-D, and this rank's, which may lie there.
        """
        ...

    def decode(self) -> bool:
        """After the collective, on the stream that waits: write the gathered memory.

        Returns:
            whether it read memory other than the gathered memory, which the launching stream must not reuse earlier.
        """
        ...

    def condemn(self) -> None:
        """Never use memory of its own again: a gather that failed may still read it, or write there."""
        ...

    def keep_for(self, group: dist.ProcessGroup | None) -> None:
        """Let `decode` keep, of what it reads, what `kept` hands out for this smaller group; None: nothing."""
        ...

    def kept(self) -> Flats | None:
        """This rank's slices, for that group, of what the last gather brought; None: of the gathered memory itself.

        Once: nothing is kept afterwards.
        """
        ...

    def release(self) -> None:
        """The buffer is released: drop what is kept, and free memory of its own in place of the gathered memory."""
        ...

    def receive(self) -> Flats:
        """Where such slices of all ranks of the group go, to be followed by `decode`; materialized."""
        ...

    def forget(self) -> None:
        """Take nothing from what an earlier `encode` kept: the shards may have changed."""
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
        return _Cast(gathered, recycler.device)


class _Cast:
    decodes = False

    def __init__(self, gathered: GatheredMemory, device: torch.device) -> None:
        self._own, self._raw, self._device = gathered.own, gathered.raw, device
        self._sent: Flats = ()  # by the last gather
        self._pairs: Pairs = []

    def encode(self, shards: Flats) -> Pairs:
        """Send the shards themselves, or their casts in this rank's slices."""
        own = self._own
        if shards[0].dtype == own[0].dtype and shards[0].device == self._device:
            sent = shards
        else:
            compat.copy(own, shards, non_blocking=True)
            sent = own
        if sent is not self._sent:
            self._pairs = list(zip(self._raw, sent, strict=True))
            self._sent = sent  # last: an interrupt before makes the next gather list them again
        return self._pairs

    def decode(self) -> bool:
        """Nothing: what arrives is what is computed with."""
        return False

    def condemn(self) -> None:
        """Nothing: it has no memory."""

    def keep_for(self, group: dist.ProcessGroup | None) -> None:
        """Nothing: gathered memory has all."""

    def kept(self) -> Flats | None:
        """Gathered memory has all."""
        return None

    def release(self) -> None:
        """Nothing: it has no memory."""

    def receive(self) -> Flats:
        """The gathered memory."""
        return self._raw

    def forget(self) -> None:
        """Nothing: nothing is kept."""
