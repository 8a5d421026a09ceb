"""Distributed checkpoints through DTensor's protocol: boxes computed locally, nothing gathered.

A rank's range of the flattened prefix becomes the fewest N-d boxes (at most 2 * len(dims) - 1), each written and
read as a chunk of the full tensor. The checkpoint does not depend on the ragged cuts: it loads with any placements
at any world size. Replicas write the same chunks, of which DCP keeps one. Nothing communicates here.
"""

import math
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ragged_shard._geometry import Box
from ragged_shard._redistribute import run_view
from ragged_shard._sharding import Sharding


def _boxes(sharding: Sharding) -> tuple[Box, ...]:
    """The boxes that this rank reads and writes; a tensor without elements is one empty box, so that it is recorded."""
    if sharding.partial:
        raise ValueError(
            f"a tensor with a pending reduction cannot be saved or loaded: {sharding}; redistribute it"
        )
    if sharding.region is None:
        raise NotImplementedError(
            f"cannot save or load {sharding}: redistribute it to Ragged, Shard or Replicate first"
        )
    if not sharding.shape.numel():
        return (Box((0,) * len(sharding.shape), tuple(sharding.shape)),)
    return sharding.region.boxes()


def chunk_list(sharding: Sharding) -> list[ChunkStorageMetadata]:
    """This rank's boxes as chunks of the full tensor."""
    return [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in _boxes(sharding)]


def write_items(fqn: str, tensor: Any) -> list[WriteItem]:
    """One write for each box."""
    sharding: Sharding = tensor._sharding
    properties = TensorProperties.create_from_tensor(tensor._local_tensor)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=sharding.shape),
        )
        for chunk in chunk_list(sharding)
    ]


def tensor_shard(tensor: Any, index: MetadataIndex) -> torch.Tensor:
    """The box at ``index.offset``, as an N-d view of the local tensor."""
    sharding: Sharding = tensor._sharding
    boxes = _boxes(sharding)
    wanted = None if index.offset is None else tuple(index.offset)
    found = [box for box in boxes if box.offsets == wanted] if wanted is not None else list(boxes)
    if len(found) != 1:
        raise ValueError(
            f"{index} is not exactly one of this rank's chunks, which are at {[b.offsets for b in boxes]}"
        )
    region = sharding.region
    assert region is not None
    local: torch.Tensor = tensor._local_tensor.detach()
    if not sharding.shape.numel():
        return local.new_empty(sharding.shape)
    inside = found[0].moved(tuple(-o for o in region.box.offsets))
    if not region.ragged:
        return local[inside.slices()]
    rest = math.prod(region.box.sizes[region.prefix :])
    return run_view(local, region.box.sizes, region.start * rest, inside)
