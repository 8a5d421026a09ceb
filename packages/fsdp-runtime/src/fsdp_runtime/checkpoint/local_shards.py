"""`local_shards`: the parts of a model's tensors that this rank holds; `Link`: a way of them to an engine.

a tensor in ranks' shards      | rank 0 |   rank 1   |  rank 2  |
boxes that engines want        |      engine 0     | engine 1   |
transfers                      | 0 -> 0 | 1 -> 0  |1->1| 2 -> 1 |
"""

import itertools
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn

from ragged_shard import Box

from .. import _torch_compat as compat
from .._torch.tree import cast_to
from .targets import boxes_of, entries_of_model, plain_name, targets_of

Boxes = Mapping[str, Sequence[Box]]
Listed = tuple[Any, Sequence[Box]]  # shape and dtype of a tensor, and boxes of it
_NAME = operator.attrgetter("name")


@dataclass(frozen=True)
class LocalShard:
    """A box of a tensor of the model.

    Attributes:
        name: in the state dict; of a tied tensor the first.
        shape: of the whole tensor.
        box: which elements: offsets and sizes along each dimension.
        tensor: their values, in the shape of the box.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor


@dataclass(frozen=True)
class Transfer:
    """A box that one rank sends to one engine."""

    name: str
    # source, target: index of the rank, and of the engine
    source: int
    target: int
    # held, wanted: the boxes that it is cut from, and that it belongs to
    held: Box
    wanted: Box
    part: Box


def local_shards(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[LocalShard]:
    """Yield this rank's boxes of every parameter and persistent buffer, as views of the shards; communicates nothing.

    They come in the order of names, so that ranks with different modules send in one order. A rank may hold no box of a
    tensor, or several; together they hold every element: replicas of HSDP, and all ranks of a tensor that is not
    sharded, the same boxes; tensor- and expert-parallel ranks their parts. With another `dtype` (of floating-point
    tensors), and where parameters are kept as codes, a box is a copy. Views are valid until values change.

    Raises:
        NotImplementedError: a parameter is a tensor subclass.
        ValueError: a tensor is on the meta device.
        RuntimeError: parameters are offloaded, or in `full_params`.
    """
    entries_of_model(model, buffers=True)  # checks, and adopts assigned values
    cast = cast_to(dtype)
    for target in sorted(targets_of(model), key=lambda target: plain_name(target.name)):
        with torch.no_grad():
            values = target.values("use iter_full_params")
        for box, view in boxes_of(values):
            yield LocalShard(plain_name(target.name), tuple(values.shape), box, cast(view))


def transfers(held: Sequence[Boxes], wanted: Sequence[Boxes]) -> list[Transfer]:
    """Transfers by which engines get the boxes that they want, by name and engine; every element is sent once to each.

    Where several ranks hold a box, engines take turns. Raises ValueError if no rank holds some of a wanted box, or if
    ranks hold parts of it twice, in boxes that differ.

    Args:
        held, wanted: boxes of each rank, and of each engine.
    """
    owners: dict[str, dict[Box, list[int]]] = {}
    for rank, name, box in _flat(held):
        owners.setdefault(name, {}).setdefault(box, []).append(rank)
    planned: list[Transfer] = []
    for target, name, box in _flat(wanted):
        parts = [
            Transfer(name, ranks[target % len(ranks)], target, own, box, part)
            for own, ranks in owners.get(name, {}).items()
            if (part := own.intersection(box)) is not None
        ]
        covered = sum(transfer.part.numel for transfer in parts)
        if covered != box.numel:
            raise ValueError(
                f"{name}: engine {target} wants {box.numel} elements at {box.offsets}; ranks hold {covered}"
            )
        planned += parts
    return sorted(planned, key=lambda each: (each.name, each.target, each.part.offsets))


def _flat(members: Sequence[Boxes]) -> list[tuple[int, str, Box]]:
    return [
        (index, name, box) for index, boxes in enumerate(members) for name in boxes for box in boxes[name]
    ]


class Link:
    """One member of a group of senders, the ranks of a trainer, which come first, and receivers, of an engine.

    Members meet at a store, where each lists the boxes that it holds or wants; from these all make the same plan. They
    go through it tensor by tensor, in the order of names, so that none waits for one that waits for it.

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
        self._dtypes: dict[str, torch.dtype] = {}
        self._own: dict[str, Listed] = {}
        self._plan: dict[str, list[Transfer]] = {}

    def hold(self, shards: Iterable[LocalShard]) -> None:
        """List the boxes of this sender, and plan the transfers; waits for all members.

        Raises:
            ValueError: senders differ in a shape or dtype, or lack part of a box; on every member, by name.
        """
        self._own = {name: _described(list(those)) for name, those in itertools.groupby(shards, _NAME)}
        self._plan_with(self._own)

    def want(self, wanted: Callable[[Mapping[str, tuple[int, ...]]], Boxes]) -> None:
        """List the boxes that this receiver wants of tensors of these shapes, and plan; waits and raises as `hold`."""
        about = self._about()
        boxes = wanted({name: tuple(shape) for name, (shape, _) in about.items()})
        self._plan_with({name: (about.get(name), those) for name, those in boxes.items()})

    def _about(self) -> dict[str, Any]:
        """Shape and dtype of each tensor that senders hold; waits for them."""
        about: dict[str, Any] = {}
        for sender in range(self._senders):
            for name, (own, _) in self._listed_by(sender).items():
                if (first := about.setdefault(name, own)) != own:
                    raise ValueError(f"{name}: sender {sender} has {own}, one before it {first}")
        return about

    def _plan_with(self, own: Mapping[str, Listed]) -> None:
        self._store.set(f"boxes/{self._member}", json.dumps(own, default=asdict))
        self._dtypes = {name: getattr(torch, dtype) for name, (_, dtype) in self._about().items()}
        listed = [self._listed_by(member) for member in range(self._size)]
        boxes = [{name: those for name, (_, those) in each.items()} for each in listed]
        planned = transfers(boxes[: self._senders], boxes[self._senders :])
        self._plan = {name: list(those) for name, those in itertools.groupby(planned, _NAME)}

    def _listed_by(self, member: int) -> dict[str, Listed]:
        return {
            name: (about, [Box(tuple(box["offsets"]), tuple(box["sizes"])) for box in boxes])
            for name, (about, boxes) in json.loads(self._store.get(f"boxes/{member}")).items()
        }

    def send(self, shards: Iterable[LocalShard]) -> int:
        """Send this sender's parts of the plan; returns the bytes. Raises RuntimeError for others than it listed."""
        nbytes, left = 0, dict(self._own)
        for name, group in itertools.groupby(shards, _NAME):
            those = list(group)
            if _described(those) != left.pop(name, None):
                raise RuntimeError(f"{name}: other boxes or another dtype than when listed; connect again")
            views = {shard.box: shard.tensor for shard in those}
            own = [each for each in self._plan.get(name, ()) if each.source == self._member]
            parts = [_bytes(views[e.held][e.part.slices(e.held.offsets)].contiguous()) for e in own]
            targets = [self._senders + each.target for each in own]
            works = [self._group.send([p], to, 0) for p, to in zip(parts, targets, strict=True)]
            for work in works:
                work.wait()
            nbytes += sum(part.nbytes for part in parts)
        if left:
            raise RuntimeError(f"{next(iter(left))}: it was listed, but has left the model; connect again")
        return nbytes

    def receive(self) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """Name, box and values of each box that this receiver wants; each is on its device, in the senders' dtype."""
        for name, those in self._plan.items():
            own = [each for each in those if self._senders + each.target == self._member]
            new = partial(torch.empty, dtype=self._dtypes[name], device=self._device)
            parts = [new(each.part.sizes) for each in own]
            works = [
                self._group.recv([_bytes(p)], each.source, 0) for p, each in zip(parts, own, strict=True)
            ]
            for work in works:
                work.wait()
            for box in dict.fromkeys(each.wanted for each in own):
                values = new(box.sizes)
                for part, each in zip(parts, own, strict=True):
                    if each.wanted == box:
                        values[each.part.slices(box.offsets)] = part
                yield name, box, values


def _described(shards: Sequence[LocalShard]) -> Listed:
    dtype = str(shards[0].tensor.dtype).removeprefix("torch.")
    return (shards[0].shape, dtype), [shard.box for shard in shards]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)
