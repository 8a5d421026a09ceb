"""The interface of encodings: of a buffer's gathers (`WireForm`), of its reductions (`ReductionForm`).

Without one a buffer gathers and reduces in the dtype of its gathered memory. A form is a description that any number of
buffers share; it makes the object that encodes for one buffer, or for one reduction. `dbuffer.encodings` has the forms.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch

from .memory.gathered import Flats, GatheredMemory
from .memory.geometry import Geometry
from .memory.recycler import Recycler, ShardMemory
from .transport import Transport, Work

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
    """How a shard becomes a gathered buffer. Forms whose shard holds values inherit what is defined here.

    Attributes:
        keeps_codes: whether the shard is codes, which nothing can be reduced into, instead of values.
    """

    keeps_codes: ClassVar[bool] = False

    def dtypes(self, shard: torch.dtype, gathered: torch.dtype) -> tuple[torch.dtype, ...]:
        """Dtypes of the payload, for the 16-byte check. Raises ValueError if the form does not support the pair."""
        ...

    def encoder(self, geometry: Geometry, gathered: GatheredMemory, recycler: Recycler) -> Encoder:
        """The encoder of one buffer; its memory comes from the recycler."""
        ...

    def shard_memory(self, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> ShardMemory:
        """The shard; codes of values in `dtype` if the form keeps these."""
        return ShardMemory(geometry, dtype, device, False)


class Exchange(Protocol):
    """One encoded reduction of several buffers: what it sends, and the memory that it takes."""

    def encode(self) -> None:
        """Allocate the memory, and encode the gathered memory. If it raises, it holds no memory."""
        ...

    def start(self, transport: Transport, label: str) -> Work | None:
        """Start sending the encoded bytes."""
        ...

    def sums(self, into_shard: Sequence[bool]) -> list[Flats]:
        """Sum the received bytes in fp32, for each buffer into its shard if `into_shard`, else its gathered memory."""
        ...


class ReductionForm(Protocol):
    """Encoding of a reduction of gathered gradients."""

    def check(self, gathered: torch.dtype) -> None:
        """Raises ValueError if gathered memory of this dtype is not supported."""
        ...

    def exchange(self, buffers: Sequence[Any]) -> Exchange:
        """The exchange of a reduction of several `DBuffer`s, which may have other forms of the same kind."""
        ...

    def row_bytes(self, geometry: Geometry, gathered: torch.dtype) -> int:
        """Bytes that each rank sends to each other rank for one buffer."""
        ...

    def scratch_bytes(self, buffers: "Sequence[tuple[ReductionForm, Geometry, torch.dtype]]") -> int:
        """Bytes that `exchange` holds in addition to the buffers: (form, geometry, dtype of the gathered memory)."""
        ...
