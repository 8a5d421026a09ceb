"""Fragments of matrices to their owners and back: one `all_to_all_single` each way, from and into buffers that stay.

rank 0 holds  A A . B        to_owner      rank 0 owns A:   [A from 1]
rank 1 holds  A . B B       --------->     rank 1 owns B:   [B from 0]
                              back         what a rank holds of its own matrices does not travel
                            <---------
held[i]       what this rank holds of matrix i, ordered by owner: sent, and later received into
owned[i, r]   what rank r holds of matrix i, ordered by rank: received, and later sent from
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from block_optim._newton_schulz import Scratch


class Lane:
    """Where transfers run. On CPU and by default: where they are called, asynchronously."""

    def start(self, transfer: Callable[[], dist.Work | None]) -> Callable[[], None]:
        """Start a transfer once what is queued now is done; the result waits for it."""
        work = transfer()
        return work.wait if work is not None else _nothing  # type: ignore[return-value]


class CudaLane(Lane):
    """A stream of its own, so that a transfer neither waits for nor delays what is queued after it.

    Buffers that travel are allocated once and never freed while a transfer runs, so none is recorded on the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def start(self, transfer: Callable[[], dist.Work | None]) -> Callable[[], None]:
        """Start a transfer after what the current stream holds; waiting makes the current stream wait, not the host."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            work = transfer()
            if work is not None:
                work.wait()
            event = torch.cuda.Event()
            event.record(self.stream)
        return lambda: torch.cuda.current_stream(self.device).wait_event(event)


def lane_for(device: torch.device) -> Lane:
    """The lane of a device."""
    return CudaLane(device) if device.type == "cuda" else Lane()


class Exchange:
    """The transfers of one bucket.

    Args:
        group: over which fragments travel.
        rank: this rank's in the group.
        owners: of each matrix.
        lengths: for each matrix, (rank, elements) of the ranks that hold some of it.
        dtype: of an element on the wire.
        scratch: where the buffers come from.
        slot: name of the buffers; exchanges of one slot must not be under way at the same time.
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
        num_ranks = group.size()
        outgoing: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
        incoming: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
        for i, (owner, parts) in enumerate(zip(owners, lengths, strict=True)):
            for holder, count in parts:
                if holder == owner:
                    continue
                if holder == rank:
                    outgoing[owner].append((i, count))
                if owner == rank:
                    incoming[holder].append((i, count))
        self._there = [sum(n for _, n in parts) for parts in outgoing]
        self._here = [sum(n for _, n in parts) for parts in incoming]
        self._held = scratch.take(f"held {slot}", (sum(self._there),), dtype)
        self._owned = scratch.take(f"owned {slot}", (sum(self._here),), dtype)
        self.held: dict[int, torch.Tensor] = {}
        self.owned: dict[tuple[int, int], torch.Tensor] = {}
        start = 0
        for parts in outgoing:
            for i, count in parts:
                self.held[i] = self._held[start : start + count]
                start += count
        start = 0
        for holder, parts in enumerate(incoming):
            for i, count in parts:
                self.owned[i, holder] = self._owned[start : start + count]
                start += count

    def to_owners(self, lane: Lane) -> Callable[[], None]:
        """Start sending ``held`` into the owners' ``owned``; the result waits. One all_to_all_single."""
        return lane.start(lambda: self._move(self._owned, self._held, self._here, self._there))

    def back(self, lane: Lane) -> Callable[[], None]:
        """Start sending ``owned`` back into ``held``; the result waits. One all_to_all_single, as many bytes."""
        return lane.start(lambda: self._move(self._held, self._owned, self._there, self._here))

    def _move(self, into: torch.Tensor, out_of: torch.Tensor, receive: list[int], send: list[int]) -> Any:
        return dist.all_to_all_single(into, out_of, receive, send, group=self._group, async_op=True)


def buffer_sizes(
    rank: int, owners: Sequence[int], lengths: Sequence[Sequence[tuple[int, int]]]
) -> tuple[int, int]:
    """Elements that an exchange's two buffers take."""
    held = sum(n for o, parts in zip(owners, lengths, strict=True) for r, n in parts if r == rank != o)
    owned = sum(n for o, parts in zip(owners, lengths, strict=True) for r, n in parts if r != o == rank)
    return held, owned


def moves(owners: Sequence[int], lengths: Sequence[Sequence[tuple[int, int]]]) -> bool:
    """Whether anything travels at all; the same answer on every rank."""
    return any(r != o for o, parts in zip(owners, lengths, strict=True) for r, n in parts if n)


def _nothing() -> None:
    return None
