"""Sends the pieces of items to their owners, and results back: one `all_to_all_single` each way.

Where every rank holds all of it (`CopyExchange`), nothing goes to owners, and one all_gather brings results back.

    rank 0 holds  A A . B        to_owners     rank 0 owns A:   [A from 1]
    rank 1 holds  A . B B       --------->     rank 1 owns B:   [B from 0]
                                  back         an owner's own elements do not travel
                                <---------
    parts[i]      this rank's elements of item i, ordered by owner: sent, and later received into
    owned[i, r]   rank r's elements of item i, ordered by rank: received, and later sent from

The buffers stay for the exchange's life.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist

from block_optim.core._torch_compat import all_gather_single
from block_optim.core.holding import Holding
from block_optim.core.scratch import Scratch
from ragged_shard.device import DeviceLayer, device_layer
from ragged_shard.dist import movable

Wait = Callable[[], object]


def no_wait() -> None:
    """Return at once."""


class TransferStream:
    """The stream of transfers: on accelerators a separate one, which neither waits for nor delays later work.

    Buffers that travel are allocated once and never freed while a transfer runs, so none is recorded on the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _layer_and_stream(self) -> tuple[DeviceLayer, Any]:
        layer = device_layer(self._device)
        return layer, layer.new_stream()

    def start(self, transfer: Callable[[], dist.Work | None]) -> Wait:
        """Start a transfer after the current stream's work; the result makes it, or the caller on CPU, wait."""
        layer, stream = self._layer_and_stream
        if not layer.asynchronous:
            work = transfer()
            return no_wait if work is None else work.wait
        with layer.on(stream):
            work = transfer()
            if work is not None:
                work.wait()
            event = layer.record()
        return partial(layer.wait, event)


def _transfer(
    collective: Callable[..., dist.Work | None],
    group: dist.ProcessGroup,
    receive: torch.Tensor,
    send: torch.Tensor,
    *sizes: Sequence[int],
) -> dist.Work | None:
    """Start a collective. With a group that moves no CPU tensors, of copies on the accelerator, and wait for it."""
    moved = movable(send, group)
    if moved is send:
        return collective(receive, send, *sizes, group=group, async_op=True)
    received = moved.new_empty(receive.shape)
    collective(received, moved, *sizes, group=group)
    receive.copy_(received)
    return None


class Exchange:
    """The transfers of some items (matrices, strips) between the ranks that hold parts of them and their owners.

    Args:
        holding: of one of the items: the process group, whose ranks all numbers here are, and this rank in it.
        owners: the owner of each item.
        lengths: for each item, (rank, elements) of the ranks that hold some of it.
        slot: name of the buffers; exchanges of one slot share memory, so they must not run at the same time.
    """

    def __init__(
        self,
        holding: Holding,
        owners: Sequence[int],
        lengths: Sequence[Sequence[tuple[int, int]]],
        dtype: torch.dtype,
        scratch: Scratch,
        slot: str,
    ) -> None:
        group, rank = holding.group, holding.rank
        assert group is not None
        self._move = partial(_transfer, dist.all_to_all_single, group)
        outgoing: list[list[tuple[int, int]]] = [[] for _ in range(group.size())]
        incoming: list[list[tuple[int, int]]] = [[] for _ in range(group.size())]
        for i, (owner, shares) in enumerate(zip(owners, lengths, strict=True)):
            for holder, count in shares:
                if rank == holder != owner:
                    outgoing[owner].append((i, count))
                elif rank == owner != holder:
                    incoming[holder].append((i, count))
        self._there = [sum(n for _, n in items) for items in outgoing]
        self._here = [sum(n for _, n in items) for items in incoming]
        self._parts = scratch.take(f"parts {slot}", (sum(self._there),), dtype)
        self._owned = scratch.take(f"owned {slot}", (sum(self._here),), dtype)
        sent = [(i, n) for items in outgoing for i, n in items]
        received = [((i, holder), n) for holder, items in enumerate(incoming) for i, n in items]
        self.parts = dict(zip((i for i, _ in sent), self._parts.split([n for _, n in sent]), strict=True))
        self.owned = dict(
            zip((k for k, _ in received), self._owned.split([n for _, n in received]), strict=True)
        )

    def to_owners(self, lane: TransferStream) -> Wait:
        """Start sending `parts` into the owners' `owned`; the result waits. One all_to_all_single."""
        return lane.start(partial(self._move, self._owned, self._parts, self._here, self._there))

    def back(self, lane: TransferStream) -> Wait:
        """Start sending `owned` back into `parts`; the result waits. One all_to_all_single of as many bytes."""
        return lane.start(partial(self._move, self._parts, self._owned, self._there, self._here))


class CopyExchange:
    """The transfers of results between ranks that all hold every item, and its owner: the interface of `Exchange`.

    ``owned[i, rank]`` of an own item and ``parts[i]`` of another's are where it is in one buffer, which has a run for
    each rank, as long as the longest. Items of one owner lie side by side in their order. `lengths` are the items'
    elements; the other arguments are as in `Exchange`.
    """

    def __init__(
        self,
        holding: Holding,
        owners: Sequence[int],
        lengths: Sequence[int],
        dtype: torch.dtype,
        scratch: Scratch,
        slot: str,
    ) -> None:
        group, rank = holding.group, holding.rank
        assert group is not None
        filled, starts = [0] * group.size(), []
        for owner, length in zip(owners, lengths, strict=True):
            starts.append(filled[owner])
            filled[owner] += length
        self._all = scratch.take(f"copies {slot}", (group.size(), max(filled)), dtype)
        self.own = self._all[rank]  # this rank's run
        self._move = partial(_transfer, all_gather_single, group, self._all.view(-1), self.own)
        self.parts: dict[int, torch.Tensor] = {}
        self.owned: dict[tuple[int, int], torch.Tensor] = {}
        for i, (owner, start, length) in enumerate(zip(owners, starts, lengths, strict=True)):
            item = self._all[owner, start : start + length]
            if owner == rank:
                self.owned[i, rank] = item
            else:
                self.parts[i] = item

    def to_owners(self, lane: TransferStream) -> Wait:
        """Send nothing: owners have everything."""
        return no_wait

    def back(self, lane: TransferStream) -> Wait:
        """Start bringing every rank's `owned` into the others' `parts`; the result waits. One all_gather, in place."""
        return lane.start(self._move)


class GradientPresence:
    """Finds the parameters with a gradient on any rank. Communicates one all_reduce of one byte per parameter.

    `copies` are the parameters' names where every rank holds all of them, so that all ranks or none must have a
    gradient; a second byte for each shows that, and the host waits for it.
    """

    def __init__(
        self, group: dist.ProcessGroup, count: int, device: torch.device, copies: Sequence[str] = ()
    ) -> None:
        self._group, self._count, self._copies = group, count, copies
        self._flags = movable(torch.zeros(count + len(copies), dtype=torch.uint8, device=device), group)

    def all_reduce(self, present: Sequence[bool]) -> Callable[[], list[bool]]:
        """Start the all_reduce of which gradients this rank has; the result waits, and returns all ranks' gradients.

        If this rank has all of them, and no parameters are copies, its host does not wait for the device.

        Raises:
            ValueError: on every rank, where some ranks have a gradient of a parameter that each holds whole.
        """
        absent = [not exists for exists in present] if self._copies else []
        if all(present):
            self._flags[: self._count].fill_(1)
            self._flags[self._count :].zero_()
        else:
            self._flags.copy_(torch.tensor([*present, *absent], dtype=torch.uint8))
        work = dist.all_reduce(self._flags, dist.ReduceOp.MAX, group=self._group, async_op=True)

        def result() -> list[bool]:
            if work is not None:
                work.wait()
            count = self._count
            both = (self._flags[:count] & self._flags[count:]).tolist() if self._copies else []
            if names := [name for name, differs in zip(self._copies, both, strict=True) if differs]:
                raise ValueError(
                    f"{', '.join(names[:5])}: some ranks have a gradient and others none, although every rank holds "
                    "the whole parameter. Average gradients over the ranks before the step (DistributedDataParallel "
                    "does, with find_unused_parameters=True also of parameters that some ranks do not use)"
                )
            if all(present):
                return [True] * len(present)
            any_rank: list[bool] = (self._flags[:count] != 0).tolist()
            return any_rank

        return result
