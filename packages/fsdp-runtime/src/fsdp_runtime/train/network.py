"""A cluster of GPUs on paper: how long collectives take. Pure arithmetic."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs; every rate in bytes a second for each GPU.

    Attributes:
        node: GPUs in a node.
        nvlink: into one GPU from the others of its node.
        nic: into one GPU's share of its node's network cards.
        hop_inside, hop_between: seconds a message takes to start, inside a node and between nodes.
        efficiency: share of the stated rates that large collectives reach.
        tree_efficiency: share that the logarithmic algorithm reaches, which trades rate for fewer hops.
        memory: bytes a second of the GPU's memory, for copies (read and write both count).
    """

    node: int = 8
    nvlink: float = 450e9
    nic: float = 50e9
    hop_inside: float = 1.5e-6
    hop_between: float = 6e-6
    efficiency: float = 0.85
    tree_efficiency: float = 0.6
    memory: float = 2.5e12

    def inside(self, ranks: int, stride: int) -> int:
        """How many of `ranks` GPUs, `stride` apart, are in one node."""
        return min(ranks, max(self.node // stride, 1))

    def gather(self, total: float, ranks: int, stride: int = 1) -> float:
        """Seconds for all ranks to receive `total` bytes, of which each holds an equal part. Also a reduce-scatter.

        The ranks are `stride` GPUs apart; those between them do the same at the same time. Ring: every node receives
        all but its own part through its cards, hop after hop. Tree: as many bytes, a logarithmic number of hops, a
        lower rate. The faster of the two.
        """
        if ranks == 1:
            return 0.0
        inside = self.inside(ranks, stride)
        nodes = -(-ranks // inside)
        local = total * (inside - 1) / inside / self.nvlink
        across = total * (nodes - 1) / nodes / (inside * self.nic)
        rate = max(local, across)
        ring = rate / self.efficiency + (inside - 1) * self.hop_inside + (nodes - 1) * self.hop_between
        tree = (
            rate / self.tree_efficiency
            + math.log2(max(nodes, 2)) * self.hop_between
            + inside * self.hop_inside
        )
        return min(ring, tree)

    def exchange(self, sent: float, ranks: int, stride: int = 1) -> float:
        """Seconds of an all-to-all in which each rank has `sent` bytes, an equal part for every rank."""
        if ranks == 1:
            return 0.0
        inside = self.inside(ranks, stride)
        local, across = sent * (inside - 1) / ranks / self.nvlink, sent * (ranks - inside) / ranks / self.nic
        hop = self.hop_inside if inside == ranks else self.hop_between
        return max(local, across) / self.efficiency + math.log2(ranks) * hop

    def send(self, nbytes: float, stride: int) -> float:
        """Seconds of a message to the rank `stride` GPUs away."""
        inside = stride < self.node
        rate, hop = (self.nvlink, self.hop_inside) if inside else (self.nic, self.hop_between)
        return nbytes / rate / self.efficiency + hop
