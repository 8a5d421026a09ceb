"""Distributed checkpoints through DTensor's protocol: boxes computed locally, nothing gathered.

A rank's range of the flattened prefix becomes the fewest N-d boxes (at most 2 * len(dims) - 1), each written and
read as a chunk of the full tensor. The checkpoint does not depend on the ragged cuts: it loads with any placements
at any world size. Replicas write the same chunks, of which DCP keeps one. Nothing communicates here.
"""

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ragged_shard._geometry import Box
from ragged_shard._redistribute import box_views
from ragged_shard._sharding import Sharding


def _boxes(sharding: Sharding) -> tuple[Box, ...]:
    """The boxes that this rank reads and writes; a tensor without elements is one empty box, so that it is recorded."""
    if sharding.partial:
        raise ValueError(f"cannot save or load a pending reduction: {sharding}; redistribute it")
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
    matching = [i for i, box in enumerate(boxes) if wanted in (None, box.offsets)]
    if len(matching) != 1:
        raise ValueError(f"{index} is not exactly one of this rank's chunks, at {[b.offsets for b in boxes]}")
    local: torch.Tensor = tensor._local_tensor.detach()
    if not sharding.shape.numel():
        return local.new_empty(sharding.shape)
    if sharding.axis is None:
        return local
    _, view = box_views(local, sharding)[matching[0]]
    if len(boxes) == 1:
        return view
    box = view.as_subclass(OneOfSeveral)
    box._what = f"{index.fqn} ({sharding})"
    return box


class OneOfSeveral(torch.Tensor):
    """One of several boxes of a tensor that this rank writes. It pickles as a plain tensor, and refuses safetensors.

    torch's HuggingFaceStorageWriter keeps one tensor for each name and file: of several boxes the last would remain,
    and the others would be lost without an error. It passes what `tensor_shard` returned to safetensors, which first
    asks each tensor for its layout. (With ``thread_count`` above 1 torch only prints the errors of its threads.)
    """

    _what: str  # a description of the tensor for the error

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _LAYOUT:
            raise NotImplementedError(
                f"{args[0]._what}: this rank holds several boxes of it, and torch's HuggingFaceStorageWriter keeps "
                "only the last. Use torch.distributed.checkpoint.FileSystemWriter, or fsdp_runtime.save_safetensors"
            )
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, OneOfSeveral):
            result._what = args[0]._what
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


_LAYOUT: Any = torch.Tensor.layout.__get__  # type: ignore[attr-defined]
