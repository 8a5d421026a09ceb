"""Large gathers and reductions straight from rank to rank, among the ranks of a gloo group.

gloo reduces a copy of the whole input over all ranks and hands out a slice; its gather copies through buffers of its
own. Here the same bytes go from where they lie to where they belong: read from the other rank's memory
(`peer_memory`) or sent and received (`sends`). Small exchanges are cheaper as one collective, and go that way.

rank 0  |own|   1   |   2   |   gathered             |own| + what 1 gave + what 2 gave -> shard of rank 0
            '---> to 1  '---> to 2
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from ragged_shard import is_cpu

from .collectives import Collectives
from .protocol import Op, Pairs, Work, living
from .sums import Sum

MIN_BYTES = 1 << 20  # below, sends cost more than one collective, and peer memory saves little time


class Mover(Protocol):
    """Exchanges tensors between the ranks of a group; all ranks make the same exchanges in the same order.

    Attributes:
        name: of the transport that this is.
    """

    name: str

    def exchange(
        self,
        label: str,
        gives: Mapping[int, Sequence[torch.Tensor]],
        takes: Mapping[int, Sequence[torch.Tensor]],
    ) -> Work:
        """Start giving each peer some tensors and taking as many from it; contiguous, on the CPU.

        Args:
            label: what is exchanged; compared between the ranks.
        """
        ...

    def reduce(self, label: str, gives: Mapping[int, Sequence[torch.Tensor]], total: Sum) -> Work:
        """Start giving each peer its slices and adding those that it gives to this rank's own.

        Args:
            label, gives: as for `exchange`.
            total: what is added to, and in which order; every slice like its own.
        """
        ...


class Direct:
    """A transport that moves large exchanges itself and leaves the others to torch's collectives.

    Args:
        group: of gloo.
        name: until a mover is chosen.
        connect: chooses the mover, or None for torch's collectives. Called at the first large exchange, on all ranks;
            may communicate.
    """

    def __init__(
        self, group: dist.ProcessGroup, name: str, connect: Callable[[dist.ProcessGroup], Mover | None]
    ) -> None:
        self.name = name
        self._group = weakref.ref(group)
        self._rank, self._size = group.rank(), group.size()
        # The other ranks, those before this one first, so that not all begin with the same.
        self._others = [(self._rank - step) % self._size for step in range(1, self._size)]
        self._small = Collectives(group)
        self._connect = connect
        self._chosen: list[Mover | None] = []  # one, from the first large exchange on

    def all_gather(self, pairs: Pairs, label: str) -> Work:
        """See `Transport`. Large ones copy this rank's `send` into `receive` unless it lies there."""
        mover = self._mover_for(pairs)
        if mover is None:
            return self._small.all_gather(pairs, label)
        takes: dict[int, list[torch.Tensor]] = {other: [] for other in self._others}
        for receive, send in pairs:
            slices = receive.chunk(self._size)
            for other in self._others:
                takes[other].append(slices[other])
            if slices[self._rank].data_ptr() != send.data_ptr():
                slices[self._rank].copy_(send)
        sends = [send for _, send in pairs]
        return mover.exchange(f"all_gather of {label}", dict.fromkeys(self._others, sends), takes)

    def reduce_scatter(self, pairs: Pairs, op: Op, label: str) -> Work:
        """See `Transport`."""
        mover = self._mover_for(pairs)
        if mover is None:
            return self._small.reduce_scatter(pairs, op, label)
        gives: dict[int, list[torch.Tensor]] = {other: [] for other in self._others}
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        for receive, send in pairs:
            slices = send.chunk(self._size)
            for other in self._others:
                gives[other].append(slices[other])
            own.append((receive, slices[self._rank]))
        return mover.reduce(f"reduce_scatter ({op}) of {label}", gives, Sum(own, self._others, op))

    def all_to_all(self, receive: torch.Tensor, send: torch.Tensor, label: str) -> Work:
        """See `Transport`."""
        mover = self._mover_for([(receive, send)])
        if mover is None:
            return self._small.all_to_all(receive, send, label)
        taken, given = receive.chunk(self._size), send.chunk(self._size)
        taken[self._rank].copy_(given[self._rank])
        gives = {other: [given[other]] for other in self._others}
        takes = {other: [taken[other]] for other in self._others}
        return mover.exchange(f"all_to_all of {label}", gives, takes)

    def all_reduce(self, tensors: list[torch.Tensor], op: Op, label: str) -> Work:
        """See `Transport`. Always torch's."""
        return self._small.all_reduce(tensors, op, label)

    def _mover_for(self, pairs: Pairs) -> Mover | None:
        """What moves this exchange; None: torch's collectives do. The same answer on all ranks."""
        if not is_cpu(pairs[0][0].device):
            return None
        if not is_large(sum(max(one.nbytes, other.nbytes) for one, other in pairs)):
            return None
        if not self._chosen:
            self._chosen.append(self._connect(living(self._group)))
            self.name = (self._chosen[0] or self._small).name
        return self._chosen[0]


def is_large(nbytes: int) -> bool:
    """Whether an exchange of so many gathered bytes goes directly."""
    return nbytes >= MIN_BYTES
