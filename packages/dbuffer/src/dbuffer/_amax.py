"""The largest magnitudes of tiles that a cut between ranks goes through, found together."""

from collections.abc import Sequence

import torch

from ._buffer import DBuffer
from .transport import Collectives
from .wire.codes.on_wire import BlockEncoder


def needs_amax(buffer: DBuffer) -> bool:
    """Whether `share_amax` must be called before the buffer's next gather. The same on all ranks."""
    return any(encoder.needs_amax(buffer.shard) for encoder in _encoders_of(buffer))


def _encoders_of(buffer: DBuffer) -> list[BlockEncoder]:
    return [buffer.encoder] if isinstance(buffer.encoder, BlockEncoder) else []


def share_amax(buffers: Sequence[DBuffer]) -> None:
    """Find the amax of all tiles that are cut, for `BlocksOnWire(cut="shared")`; every rank calls it.

    Issues one MAX all-reduce of 4 bytes a cut tile over the shard axis, for all buffers together, on the current
    stream; nothing where no tile is cut or no shard has changed since it was quantized.

    Args:
        buffers: of one mesh and device, the same on every rank.

    Raises:
        ValueError: of several meshes.
    """
    stale = [buffer for buffer in buffers if needs_amax(buffer)]
    if not stale:
        return
    view = stale[0].mesh_view
    if any(buffer.mesh_view != view for buffer in stale):
        raise ValueError(
            f"share_amax: {[buffer.name for buffer in stale]} are on several meshes; call it once for each"
        )
    encoders = [
        (encoder, buffer.shard)
        for buffer in stale
        for encoder in _encoders_of(buffer)
        if encoder.needs_amax(buffer.shard)
    ]
    sizes = [encoder.num_shared for encoder, _ in encoders]
    flat = torch.zeros(sum(sizes), device=stale[0].device)
    pieces = flat.split(sizes)
    for (encoder, shards), piece in zip(encoders, pieces, strict=True):
        encoder.write_amax(shards, piece)
    # Of bits that are not negative numbers' the order is that of the numbers, with infinity and NaN on top.
    work = Collectives(view.group).all_reduce([flat.view(torch.int32)], "max", "amax of cut tiles")
    if work is not None:
        work.wait()
    for (encoder, shards), piece in zip(encoders, pieces, strict=True):
        encoder.read_amax(shards, piece)
