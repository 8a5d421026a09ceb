"""The sums of a reduction."""

from collections.abc import Mapping, Sequence

import torch

from .protocol import Op, Pairs

PIECE_BYTES = 1 << 18  # of each rank's memory, added while the sum is in the cache


class Sum:
    """This rank's slices and the peers', added always in the same order of peers.

    Args:
        pairs: (receive, own), contiguous and 1-D; `receive` may be `own`.
        peers: all other ranks; in this order they are added.
        op: "avg" divides by the number of ranks at the end.
    """

    def __init__(self, pairs: Pairs, peers: Sequence[int], op: Op) -> None:
        self._pairs, self.peers, self._op = pairs, tuple(peers), op

    @property
    def own(self) -> list[torch.Tensor]:
        """This rank's slices; peers' slices have the same shapes."""
        return [own for _, own in self._pairs]

    @torch.no_grad()
    def add(self, slices: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Write the sums of this rank's and all peers' slices."""
        for index, (receive, own) in enumerate(self._pairs):
            first, *others = (slices[peer][index] for peer in self.peers)
            step = PIECE_BYTES // own.itemsize
            for begin in range(0, own.numel(), step):
                part = slice(begin, begin + step)
                total = torch.add(own[part], first[part], out=receive[part])
                for other in others:
                    total.add_(other[part])
                if self._op == "avg":
                    total.div_(1 + len(self.peers))
