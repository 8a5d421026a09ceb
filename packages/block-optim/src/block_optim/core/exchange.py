"""Brings the pieces of what one rank owns to that rank, and results back: one `all_to_all_single` each way.

    rank 0 holds  A A . B        to_owners     rank 0 owns A:   [A from 1]
    rank 1 holds  A . B B       --------->     rank 1 owns B:   [B from 0]
                                  back         what an owner holds itself does not travel
                                <---------
    held[i]       what this rank holds of item i, ordered by owner: sent, and later received into
    owned[i, r]   what rank r holds of item i, ordered by rank: received, and later sent from

The buffers stay for the exchange's life.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist

from block_optim.core.scratch import Scratch
from ragged_shard import DeviceLayer, device_layer

Wait = Callable[[], object]


def nothing() -> None:
    """Waits for nothing."""


class TransferStream:
    """The stream of transfers: on accelerators a separate one, which neither waits for nor delays later work.

    Buffers that travel are allocated once and never freed while a transfer runs, so none is recorded on the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _layer(self) -> DeviceLayer:
        return device_layer(self._device)

    @cached_property
    def _stream(self) -> Any:
        return self._layer.new_stream()

    def start(self, transfer: Callable[[], dist.Work | None]) -> Wait:
        """Start a transfer after what the current stream holds.

        Returns:
            makes the current stream wait for the transfer, on CPU the caller.
        """
        if not self._layer.asynchronous:
            work = transfer()
            return nothing if work is None else work.wait
        with self._layer.on(self._stream):
            work = transfer()
            if work is not None:
                work.wait()
            event = self._layer.record()
        return partial(self._layer.wait, event)


class Exchange:
    """The transfers of some items (matrices, strips) between those who hold some of them and their owners.

    Args:
        group: the process group; ranks are ranks in it.
        rank: this rank's.
        owners: the owner of each item.
        lengths: for each item, (rank, elements) of the ranks that hold some of it.
        dtype: of what travels.
        scratch: where the buffers come from.
        slot: name of the buffers; exchanges of one slot share memory, so they must not run at the same time.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        owners: Sequence[int],
        lengths: Sequence[Sequence[tuple[int, int]]],
        dtype: torch.dtype,
        scratch: Scratch,
        slot: str,
    ) -> None:
        self._group = group
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
        self._held = scratch.take(f"held {slot}", (sum(self._there),), dtype)
        self._owned = scratch.take(f"owned {slot}", (sum(self._here),), dtype)
        sent = [(i, n) for items in outgoing for i, n in items]
        received = [((i, holder), n) for holder, items in enumerate(incoming) for i, n in items]
        self.held = dict(zip((i for i, _ in sent), self._held.split([n for _, n in sent]), strict=True))
        self.owned = dict(
            zip((k for k, _ in received), self._owned.split([n for _, n in received]), strict=True)
        )

    def to_owners(self, lane: TransferStream) -> Wait:
        """Start sending `held` into the owners' `owned`; the result waits. One all_to_all_single."""
        return lane.start(lambda: self._move(self._owned, self._held, self._here, self._there))

    def back(self, lane: TransferStream) -> Wait:
        """Start sending `owned` back into `held`; the result waits. One all_to_all_single of as many bytes."""
        return lane.start(lambda: self._move(self._held, self._owned, self._there, self._here))

    def _move(
        self, into: torch.Tensor, out_of: torch.Tensor, receive: list[int], send: list[int]
    ) -> dist.Work | None:
        work: dist.Work | None = dist.all_to_all_single(
            into, out_of, receive, send, group=self._group, async_op=True
        )
        return work


def travels(owners: Sequence[int], lengths: Sequence[Sequence[tuple[int, int]]]) -> int:
    """Elements that an exchange moves one way, over all ranks; the same answer on every rank."""
    return sum(n for o, shares in zip(owners, lengths, strict=True) for r, n in shares if r != o)


class GradientPresence:
    """Finds the parameters with a gradient on any rank. Communicates one all_reduce of one byte per parameter.

    Args:
        group: the process group.
        count: number of parameters, the same on every rank.
        device: of the flags.
    """

    def __init__(self, group: dist.ProcessGroup, count: int, device: torch.device) -> None:
        self._group = group
        self._flags = torch.zeros(count, dtype=torch.uint8, device=device)

    def all_reduce(self, present: Sequence[bool]) -> Callable[[], list[bool]]:
        """Start the all_reduce of which gradients this rank has; the result waits, and returns those of any rank.

        If this rank has all of them, its host does not wait for the device.
        """
        if all(present):
            self._flags.fill_(1)
        else:
            self._flags.copy_(torch.tensor(present, dtype=torch.uint8))
        work = dist.all_reduce(self._flags, dist.ReduceOp.MAX, group=self._group, async_op=True)

        def result() -> list[bool]:
            if work is not None:
                work.wait()
            if all(present):
                return [True] * len(present)
            any_rank: list[bool] = (self._flags != 0).tolist()
            return any_rank

        return result
