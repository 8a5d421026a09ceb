"""A save planner of torch.distributed.checkpoint that gathers no plans: layouts say what every rank writes.

    DCP's default    every rank sends its plan, an item for each chunk; rank 0 removes copies and sends all of them back
    this one         every rank sends a fingerprint of 32 bytes; rank 0 works out the metadata; nothing else comes back

Which of several replicas writes a tensor follows from its name.
"""

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor, Replicate

from ragged_shard import RaggedDTensor, chunks_of_ranks

from .. import _torch_compat as compat


class LocalSavePlanner(DefaultSavePlanner):
    """Save without gathering plans: `dcp.save(state_dict, planner=LocalSavePlanner(), ...)`.

    For state dicts that have the same names, shapes and placements on every rank, on meshes of all ranks that save, as
    those of sharded models and their optimizers; plain tensors and other values are those of the coordinator. What is
    saved is a checkpoint of DCP's, for any loader, at any number of ranks. DCP's two planning messages a rank remain,
    of some hundred bytes whatever the model; what it gathers after writing, the place of each chunk in its file, is as
    before.

    Raises:
        ValueError: when saving, on every rank (as DCP's CheckpointException): ranks with different state dicts.
    """

    def create_local_plan(self) -> SavePlan:
        """This rank's fingerprint; what it writes stays here."""
        items: list[WriteItem] = []
        for name, value in self.state_dict.items():
            if isinstance(value, (DTensor, RaggedDTensor)):
                if _writes(name, value):
                    items += compat.write_items(name, value)
            elif self.is_coordinator:
                items += compat.write_items(name, value)
        self._items = items
        return SavePlan([], planner_data=_fingerprint(self.state_dict))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The metadata of everything, from this rank's own state dict."""
        prints = [plan.planner_data for plan in all_plans]
        own = _fingerprint(self.state_dict)
        if other := [rank for rank, found in enumerate(prints) if found != own]:
            raise ValueError(
                f"LocalSavePlanner: ranks {other[:8]} ({len(other)} in all) have other names, shapes, dtypes or "
                "placements than the coordinator; use DefaultSavePlanner, which gathers plans"
            )
        found = {name: _described(name, value) for name, value in self.state_dict.items()}
        plans = [replace(plan, planner_data=None) for plan in all_plans]
        mappings: Any = self.mappings if self.flatten_state_dict else None
        return plans, Metadata(found, planner_data=mappings)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """What this rank writes."""
        self.plan = replace(new_plan, items=self._items)
        return self.plan


def _writes(name: str, tensor: Any) -> bool:
    """Whether this rank writes its chunks: of replicas the one that the name chooses."""
    coordinate = tensor.device_mesh.get_coordinate()
    number = zlib.crc32(name.encode())
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            number, wanted = divmod(number, tensor.device_mesh.size(axis))
            if coordinate is None or coordinate[axis] != wanted:
                return False
    return coordinate is not None


def _described(name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return BytesStorageMetadata()
    chunks = list(_chunks(value))
    numel = sum(chunk.sizes.numel() for chunk in chunks)
    if numel != value.numel():
        raise ValueError(
            f"LocalSavePlanner: {name} has {value.numel()} elements, and ranks hold {numel} of them"
        )
    local = value.to_local() if isinstance(value, (DTensor, RaggedDTensor)) else value
    return TensorStorageMetadata(TensorProperties.create_from_tensor(local), value.size(), chunks)


def _chunks(value: torch.Tensor) -> Iterator[ChunkStorageMetadata]:
    if isinstance(value, (DTensor, RaggedDTensor)):
        for _, chunks in chunks_of_ranks(value):
            yield from chunks
    else:
        yield ChunkStorageMetadata(torch.Size([0] * value.ndim), value.size())


def _fingerprint(state_dict: dict[str, Any]) -> bytes:
    """Of everything that the metadata follow from; meshes by their ranks."""
    digest, meshes = hashlib.sha256(), dict[int, bytes]()
    for name, value in sorted(state_dict.items()):
        said: tuple[Any, ...] = (name, type(value).__name__)
        if isinstance(value, torch.Tensor):
            said += (tuple(value.shape), str(value.dtype))
        if isinstance(value, (DTensor, RaggedDTensor)):
            mesh = value.device_mesh
            if id(mesh) not in meshes:
                ranks = f"{tuple(mesh.shape)} {mesh.mesh.flatten().tolist()}"
                meshes[id(mesh)] = hashlib.sha256(ranks.encode()).digest()
            said += (repr(value.placements), meshes[id(mesh)])
        digest.update(repr(said).encode())
    return digest.digest()
