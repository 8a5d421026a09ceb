"""What a reduction adds up."""

from collections.abc import Sequence

import torch

from .protocol import Op, Pairs


class Sum:
    """This rank's own slices, to which what each peer gives is added, always in the same order of peers.

    Args:
        pairs: (receive, own), contiguous and 1-D; `receive` may be `own`.
        peers: all other ranks; in this order they are added.
        op: "avg" divides by the number of ranks at the end.
    """

    def __init__(self, pairs: Pairs, peers: Sequence[int], op: Op) -> None:
        self.pairs, self.peers, self._op = pairs, tuple(peers), op
        self.next = self.peers[0]

    @property
    def own(self) -> list[torch.Tensor]:
        """This rank's slices; those of peers are like them."""
        return [own for _, own in self.pairs]

    def add(self, index: int, begin: int, given: torch.Tensor) -> None:
        """Add what the next peer gives for one pair, from element `begin` on."""
        receive, own = self.pairs[index]
        here = slice(begin, begin + given.numel())
        torch.add((own if self.next == self.peers[0] else receive)[here], given, out=receive[here])
        if self._op == "avg" and self.next == self.peers[-1]:
            receive[here].div_(1 + len(self.peers))

    def end_peer(self) -> bool:
        """All that the next peer gives has been added; whether another one follows."""
        following = self.peers.index(self.next) + 1
        if following < len(self.peers):
            self.next = self.peers[following]
        return following < len(self.peers)
