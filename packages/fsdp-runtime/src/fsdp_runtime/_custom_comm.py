"""Collectives of the user's own (`set_custom_all_gather`, `set_custom_reduce_scatter`) as transports of dbuffer.

FSDP2's protocol is `allocate` and a call on flat memory, and staging is its point: the memory may come from a pool
that the network knows. So each call here copies in and out, which the other transports do not:

    all-gather       shards --copy--> own slice of what `allocate` gave --comm--> all of it --copy--> gathered memory
    reduce-scatter   gathered memory --copy--> what `allocate` gave --comm--> another such --copy--> shards

As in FSDP2 the call is made with `async_op=False`: on a GPU the stream waits for it, on CPU the rank.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from dbuffer import Collectives, Op, Pairs, Transport

_OPS = {"avg": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM}


class _Custom(Collectives):
    """torch's collectives, except the one that the user replaced."""

    @classmethod
    def by(cls, comm: Any, method: str) -> Callable[[dist.ProcessGroup], Transport]:
        """Factory of the transport, for dbuffer. Raises TypeError if `comm` has not FSDP2's protocol."""
        if not (callable(comm) and callable(getattr(comm, "allocate", None))):
            raise TypeError(
                f"{method} got {comm!r}; expected an object with allocate(size, *, dtype, device) and __call__, as "
                "subclasses of torch.distributed.fsdp's AllGather or ReduceScatter have"
            )
        return lambda group: cls(group, comm)

    def __init__(self, group: dist.ProcessGroup, comm: Any) -> None:
        super().__init__(group)
        self.name = type(comm).__name__
        self._comm = comm
        self._ranks = group.size()
        self._rank = group.rank()

    def _allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffer: torch.Tensor = self._comm.allocate((numel,), dtype=dtype, device=device)
        if buffer.numel() != numel or buffer.dtype != dtype or not buffer.is_contiguous():
            raise RuntimeError(
                f"{self.name}.allocate gave {buffer.numel()} elements of {buffer.dtype}; expected {numel} contiguous "
                f"ones of {dtype}"
            )
        return buffer.view(-1)

    def _call(self, **arguments: Any) -> None:
        work = self._comm(**arguments, group=self.group(), async_op=False)
        if work is not None:
            work.wait()


class CustomAllGather(_Custom):
    """An all-gather of the user's."""

    def all_gather(self, pairs: Pairs, label: str) -> None:
        """One call on the tensors of one dtype, or on bytes where there are several. Nothing is left to wait for."""
        if len({send.dtype for _, send in pairs}) > 1:
            pairs = [(receive.view(torch.uint8), send.view(torch.uint8)) for receive, send in pairs]
        numels = [send.numel() for _, send in pairs]
        dtype, device = pairs[0][1].dtype, pairs[0][1].device
        total = sum(numels)
        gathered = self._allocate(total * self._ranks, dtype, device)
        own = gathered.narrow(0, self._rank * total, total)
        for place, (_, send) in zip(own.split(numels), pairs, strict=True):
            place.copy_(send)
        self._call(output_tensor=gathered, input_tensor=own)
        for place, (receive, _) in zip(_columns(gathered, self._ranks, numels), pairs, strict=True):
            receive.view(self._ranks, -1).copy_(place)


class CustomReduceScatter(_Custom):
    """A reduce-scatter of the user's."""

    def reduce_scatter(self, pairs: Pairs, op: Op, label: str) -> None:
        """One call for each dtype, in the order in which they come. Nothing is left to wait for."""
        for dtype in dict.fromkeys(send.dtype for _, send in pairs):
            self._reduce([pair for pair in pairs if pair[1].dtype == dtype], op)

    def all_to_all(self, receive: torch.Tensor, send: torch.Tensor, label: str) -> NoReturn:
        """Refused: gradients in a wire form are exchanged, not reduced, and would go past the user's object."""
        raise NotImplementedError(
            f"{label}: set_custom_reduce_scatter({self.name}) reduces gradients in full; this unit sends them in a "
            "wire form, by an all-to-all; use QuantizationPolicy(gradients=None) or leave the custom reduction out"
        )

    def _reduce(self, pairs: Pairs, op: Op) -> None:
        numels = [receive.numel() for receive, _ in pairs]
        dtype, device = pairs[0][1].dtype, pairs[0][1].device
        total = sum(numels)
        buffer = self._allocate(total * self._ranks, dtype, device)
        for place, (_, send) in zip(_columns(buffer, self._ranks, numels), pairs, strict=True):
            place.copy_(send.view(self._ranks, -1))
        reduced = self._allocate(total, dtype, device)
        self._call(output_tensor=reduced, input_tensor=buffer, op=_OPS[op])
        for place, (receive, _) in zip(reduced.split(numels), pairs, strict=True):
            receive.copy_(place)


def _columns(flat: torch.Tensor, ranks: int, numels: Sequence[int]) -> Sequence[torch.Tensor]:
    """Each tensor's slices of all ranks, (ranks, numel), in memory ordered by rank."""
    columns: Sequence[torch.Tensor] = flat.view(ranks, -1).split(list(numels), dim=1)
    return columns
