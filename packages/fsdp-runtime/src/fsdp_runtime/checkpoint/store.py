"""Checkpoints of `torch.distributed.checkpoint` in a key-value store instead of a folder.

KEY                      id of the complete checkpoint, set last
KEY/ID/metadata          tensors, boxes, and where they are
KEY/ID/RANK/NUMBER       values of one box of one tensor, or one pickled object; in parts of 4 MiB
"""

import dataclasses
import io
import pickle
import uuid
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ragged_shard import CPU

_PART = 4 << 20  # bytes; stores limit the size of a value


class Store(Protocol):
    """A key-value store, such as torch's TCPStore; `get` of a key that is not set waits or raises."""

    def set(self, key: str, value: Any, /) -> Any:
        """Set a value: bytes, or a short string."""

    def get(self, key: str, /) -> bytes:
        """Value of a key."""


class _InStore:
    """Methods that reading and writing share."""

    def __init__(self, store: Store, key: str = "") -> None:
        self._store, self._key = store, key

    def reset(self, checkpoint_id: Any = None) -> None:
        """Take the key of this save or load."""
        self._key = str(checkpoint_id or self._key)

    def prepare_local_plan(self, plan: Any) -> Any:
        """The plan as it is."""
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether it can be a key: always."""
        return True


class StoreWriter(_InStore, StorageWriter):
    """Storage of `dcp.save(snapshot(model).model, storage_writer=StoreWriter(store, key))`.

    Each rank sets its own boxes, copied to the CPU one after the other; rank 0 sets `key` when all are there. A reader
    gets one whole checkpoint, also while the next one is written to the same key; older ones stay until the caller
    deletes them from the store. `dcp.save` communicates its plans.

    Args:
        store: on every rank, of one content.
        key: of the checkpoint. Defaults to the `checkpoint_id` of `dcp.save`.
    """

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank keys for its values, under a new id."""
        self._prefix = uuid.uuid4().hex
        places = [f"{self._prefix}/{rank}" for rank in range(len(plans))]
        return [
            dataclasses.replace(plan, storage_data=place) for plan, place in zip(plans, places, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Set this rank's values."""
        results = []
        for number, item in enumerate(plan.items):
            value: Any = planner.resolve_data(item)
            if item.type != WriteItemType.BYTE_IO:
                value, tensor = io.BytesIO(), value.detach()
                torch.save(tensor.cpu().clone(memory_format=torch.contiguous_format), value)
            place = f"{plan.storage_data}/{number}"
            size = _set(self._store, f"{self._key}/{place}", value.getvalue())
            results.append(WriteResult(item.index, size, place))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Set the metadata, then the key."""
        metadata.storage_data = {result.index: result.storage_data for rank in results for result in rank}
        _set(self._store, f"{self._key}/{self._prefix}/metadata", pickle.dumps(metadata))
        self._store.set(self._key, self._prefix)


class StoreReader(_InStore, StorageReader):
    """Storage of `dcp.load(model.state_dict(), storage_reader=StoreReader(store, key))`, on any number of ranks.

    Each rank gets the boxes that its shards overlap, one after the other. Metadata and pickled objects are unpickled,
    as those of `dcp.load` are: read from stores that you trust.

    Args:
        store: that holds the checkpoint, or soon will, if its `get` waits.
        key: of the checkpoint. Defaults to the `checkpoint_id` of `dcp.load`.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Metadata of the complete checkpoint."""
        prefix = self._store.get(self._key).decode()
        metadata: Metadata = pickle.loads(_get(self._store, f"{self._key}/{prefix}/metadata"))
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Keep where the values are."""
        self._places = metadata.storage_data

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Get this rank's boxes, and copy them into its tensors."""
        latest, content = "", io.BytesIO()
        for item in plan.items:
            place = self._places[item.storage_index]
            if place != latest:
                latest, content = place, io.BytesIO(_get(self._store, f"{self._key}/{place}"))
            content.seek(0)
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, content)
                continue
            box = torch.load(content, map_location=CPU, weights_only=True)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                box = box.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(box)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _set(store: Store, key: str, data: bytes) -> int:
    for part, start in enumerate(range(0, len(data), _PART)):
        store.set(f"{key}/{part}", data[start : start + _PART])
    store.set(key, str(len(data)))
    return len(data)


def _get(store: Store, key: str) -> bytes:
    size = int(store.get(key))
    return b"".join(store.get(f"{key}/{part}") for part in range(-(-size // _PART)))
