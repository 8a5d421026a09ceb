"""Distributed checkpoints, through the protocol that DTensor has: boxes computed locally, nothing gathered.

A rank's range of the flattened prefix becomes the fewest N-d boxes (at most 2 * len(dims) - 1), each written
and read as a chunk of the full tensor. A checkpoint knows nothing of ragged: it loads into any layout at any
world size. Replicas write the same chunks, of which DCP keeps one. Nothing communicates here.
"""

import math
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ragged_shard._geometry import Box
from ragged_shard._layout import Layout
from ragged_shard._redistribute import run_view


def _boxes(layout: Layout) -> tuple[Box, ...]:
    """What this rank reads and writes; an empty tensor is one empty box, so that the checkpoint knows of it."""
    if layout.partial:
        raise ValueError(
            f"a tensor with a pending reduction cannot be saved or loaded: {layout}; redistribute it"
        )
    if layout.region is None:
        raise NotImplementedError(
            f"checkpoints of {layout}: redistribute it to Ragged, Shard or Replicate first"
        )
    if not layout.shape.numel():
        return (Box((0,) * len(layout.shape), tuple(layout.shape)),)
    return layout.region.boxes()


def chunk_list(layout: Layout) -> list[ChunkStorageMetadata]:
    """This rank's boxes as chunks of the full tensor."""
    return [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in _boxes(layout)]


def write_items(fqn: str, tensor: Any) -> list[WriteItem]:
    """One write for each box."""
    layout: Layout = tensor._layout
    properties = TensorProperties.create_from_tensor(tensor._local_tensor)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=layout.shape),
        )
        for chunk in chunk_list(layout)
    ]


def tensor_shard(tensor: Any, index: MetadataIndex) -> torch.Tensor:
    """The box at ``index.offset``, as an N-d view of the local tensor."""
    layout: Layout = tensor._layout
    boxes = _boxes(layout)
    wanted = None if index.offset is None else tuple(index.offset)
    found = [box for box in boxes if box.offsets == wanted] if wanted is not None else list(boxes)
    if len(found) != 1:
        raise ValueError(
            f"{index} names none, or several, of the chunks of this rank: {[b.offsets for b in boxes]}"
        )
    region = layout.region
    assert region is not None
    local: torch.Tensor = tensor._local_tensor.detach()
    if not layout.shape.numel():
        return local.new_empty(layout.shape)
    inside = found[0].moved(tuple(-o for o in region.box.offsets))
    if not region.ragged:
        return local[inside.slices()]
    rest = math.prod(region.box.sizes[region.prefix :])
    return run_view(local, region.box.sizes, region.start * rest, inside)
