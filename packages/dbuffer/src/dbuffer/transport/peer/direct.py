"""Large gathers and reductions through peer memory, among the ranks of a gloo group.

gloo reduces a copy of the whole input over all ranks and returns a slice; its gather copies through internal buffers.
Here each rank reads the same bytes straight from the other rank's memory. Small exchanges are cheaper as one
collective and use that.

rank 0  |own|   1   |   2   |   gathered             |own| + what 1 gave + what 2 gave -> shard of rank 0
            '---> to 1  '---> to 2
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from ragged_shard.device import is_cpu

from ..collectives import Collectives
from ..protocol import Op, Pairs, Work
from .peer_memory import PeerMemory, Sum

MIN_BYTES = 1 << 20  # below, peer memory saves little time


class Direct:
    """A transport that moves large exchanges through peer memory and the rest through torch's collectives.

    Args:
        group: a gloo group.
        name: until the ranks are connected.
        connect: returns the connections, or None for torch's collectives. Called on all ranks at the first large
            exchange; may communicate.
    """

    def __init__(
        self, group: dist.ProcessGroup, name: str, connect: Callable[[dist.ProcessGroup], PeerMemory | None]
    ) -> None:
        self.name = name
        self._rank, self._size = group.rank(), group.size()
        # Other ranks, starting with the one before this rank, so that not all ranks start with the same one.
        self._others = [(self._rank - step) % self._size for step in range(1, self._size)]
        self._small = Collectives(group)
        self._connect = connect
        self._peers: list[PeerMemory | None] = []  # filled at the first large exchange

    def all_gather(self, pairs: Pairs, label: str) -> Work | None:
        """See `Transport`. A large one copies this rank's `send` into `receive`, unless it is a slice of it.

        There peers read it: gathered memory is what other ranks can map, shards are not.
        """
        peers = self._peers_for(pairs)
        if peers is None:
            return self._small.all_gather(pairs, label)
        takes: dict[int, list[torch.Tensor]] = {other: [] for other in self._others}
        gives: list[torch.Tensor] = []
        for receive, send in pairs:
            slices = receive.chunk(self._size)
            for other in self._others:
                takes[other].append(slices[other])
            own = slices[self._rank]
            if own.data_ptr() != send.data_ptr():
                own.copy_(send)
            gives.append(own)
        return peers.exchange(f"all_gather of {label}", dict.fromkeys(self._others, gives), takes)

    def reduce_scatter(self, pairs: Pairs, op: Op, label: str) -> Work | None:
        """See `Transport`."""
        peers = self._peers_for(pairs)
        if peers is None:
            return self._small.reduce_scatter(pairs, op, label)
        gives: dict[int, list[torch.Tensor]] = {other: [] for other in self._others}
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        for receive, send in pairs:
            slices = send.chunk(self._size)
            for other in self._others:
                gives[other].append(slices[other])
            own.append((receive, slices[self._rank]))
        total = Sum(own, self._others, op)
        takes = dict.fromkeys(self._others, total.own)
        return peers.exchange(f"reduce_scatter ({op}) of {label}", gives, takes, total)

    def all_to_all(self, receive: torch.Tensor, send: torch.Tensor, label: str) -> Work | None:
        """See `Transport`."""
        peers = self._peers_for([(receive, send)])
        if peers is None:
            return self._small.all_to_all(receive, send, label)
        received, sent = receive.chunk(self._size), send.chunk(self._size)
        received[self._rank].copy_(sent[self._rank])
        gives = {other: [sent[other]] for other in self._others}
        takes = {other: [received[other]] for other in self._others}
        return peers.exchange(f"all_to_all of {label}", gives, takes)

    def all_reduce(self, tensors: list[torch.Tensor], op: Op, label: str) -> Work | None:
        """See `Transport`. Always by torch's collectives."""
        return self._small.all_reduce(tensors, op, label)

    def _peers_for(self, pairs: Pairs) -> PeerMemory | None:
        """The connections if this exchange goes through peer memory, else None. The same on all ranks."""
        if not is_cpu(pairs[0][0].device):
            return None
        if sum(max(receive.nbytes, send.nbytes) for receive, send in pairs) < MIN_BYTES:
            return None
        if not self._peers:
            self._peers.append(self._connect(self._small.group()))
            self.name = (self._peers[0] or self._small).name
        return self._peers[0]
