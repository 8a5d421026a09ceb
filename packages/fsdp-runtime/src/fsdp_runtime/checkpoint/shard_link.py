"""`Link`: shards from the ranks of a trainer to the members of an engine, which has a world of its own.

Members meet at a store, where each lists the boxes that it holds or wants; from these all make the same plan. All then
go through it tensor by tensor, in the order of names, so that none waits for one that waits for it.
"""

import itertools
import json
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from ragged_shard import Box

from .. import _torch_compat as compat
from .local_shards import LocalShard, Transfer, transfers

_NAME = operator.attrgetter("name")


class Link:
    """One member of a group of senders, which come first, and receivers.

    Args:
        address: host and port of the store, which the first sender opens.
        device: of the tensors.
    """

    def __init__(
        self,
        address: tuple[str, int],
        senders: int,
        receivers: int,
        member: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self._senders, self._size, self._member, self._device = senders, senders + receivers, member, device
        timeout = timedelta(seconds=timeout_s)
        self._store = compat.store_at(*address, self._size, timeout, is_master=member == 0)
        self._group = compat.group_across(self._store, member, self._size, device, timeout)
        self._held: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._own: dict[str, Any] = {}
        self._plan: dict[str, list[Transfer]] = {}

    def hold(self, shards: Iterable[LocalShard]) -> None:
        """List the boxes of this sender."""
        self._own = {name: _described(list(those)) for name, those in itertools.groupby(shards, _NAME)}
        self._store.set(f"boxes/{self._member}", json.dumps(self._own))

    def held(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor that senders hold; waits for them. Raises ValueError if senders differ."""
        for sender in range(self._senders):
            for name, (shape, dtype, _) in self._listed_by(sender).items():
                found = (tuple(shape), getattr(torch, dtype))
                if (first := self._held.setdefault(name, found)) != found:
                    raise ValueError(f"{name}: sender {sender} has {found}, one before it {first}")
        return self._held

    def want(self, wanted: Mapping[str, Sequence[Box]]) -> None:
        """List the boxes that this receiver wants."""
        listed = {name: [_listed(box) for box in boxes] for name, boxes in wanted.items()}
        self._store.set(f"boxes/{self._member}", json.dumps(listed))

    def plan(self) -> None:
        """Plan the transfers; waits for all members. Raises ValueError as `held`, and if senders lack part of a box."""
        self.held()
        held = [
            {name: _boxes(boxes) for name, (_, _, boxes) in self._listed_by(sender).items()}
            for sender in range(self._senders)
        ]
        wanted = [
            {name: _boxes(boxes) for name, boxes in self._listed_by(receiver).items()}
            for receiver in range(self._senders, self._size)
        ]
        self._plan = {name: list(those) for name, those in itertools.groupby(transfers(held, wanted), _NAME)}

    def _listed_by(self, member: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._store.get(f"boxes/{member}"))
        return found

    def send(self, shards: Iterable[LocalShard]) -> int:
        """Send this sender's parts of the plan; returns the bytes. Raises RuntimeError for others than it listed."""
        nbytes, left = 0, dict(self._own)
        for name, group in itertools.groupby(shards, _NAME):
            those = list(group)
            if _described(those) != left.pop(name, None):
                raise RuntimeError(f"{name}: other boxes or another dtype than when listed; connect again")
            views = {shard.box: shard.tensor for shard in those}
            own = [each for each in self._plan.get(name, ()) if each.source == self._member]
            parts = (views[each.held][each.part.slices(each.held.offsets)] for each in own)
            sent = [_bytes(part.contiguous()) for part in parts]
            works = [
                self._group.send([part], self._senders + each.target, 0)
                for part, each in zip(sent, own, strict=True)
            ]
            for work in works:
                work.wait()
            nbytes += sum(part.nbytes for part in sent)
        if left:
            raise RuntimeError(f"{next(iter(left))}: it was listed, but has left the model; connect again")
        return nbytes

    def receive(self) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """Name, box and values of each box that this receiver wants; each is on its device, in the senders' dtype."""
        for name, those in self._plan.items():
            own = [each for each in those if self._senders + each.target == self._member]
            dtype = self._held[name][1]
            parts = [torch.empty(each.part.sizes, dtype=dtype, device=self._device) for each in own]
            works = [
                self._group.recv([_bytes(part)], each.source, 0)
                for part, each in zip(parts, own, strict=True)
            ]
            for work in works:
                work.wait()
            for box in dict.fromkeys(each.wanted for each in own):
                mine = [(p, each.part) for p, each in zip(parts, own, strict=True) if each.wanted == box]
                values = torch.empty(box.sizes, dtype=dtype, device=self._device)
                for part, place in mine:
                    values[place.slices(box.offsets)] = part
                yield name, box, values


def _described(shards: Sequence[LocalShard]) -> tuple[Any, ...]:
    """Shape, dtype and boxes of one tensor, for JSON."""
    dtype = str(shards[0].tensor.dtype).removeprefix("torch.")
    return shards[0].shape, dtype, [_listed(shard.box) for shard in shards]


def _listed(box: Box) -> tuple[Sequence[int], Sequence[int]]:
    return box.offsets, box.sizes


def _boxes(listed: Iterable[tuple[Sequence[int], Sequence[int]]]) -> list[Box]:
    return [Box(tuple(offsets), tuple(sizes)) for offsets, sizes in listed]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)
