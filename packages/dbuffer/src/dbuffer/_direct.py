"""Gathers and reductions over gloo, rank to rank, for few ranks and much data.

gloo reduces a copy of the whole input over all ranks and hands out a slice; its gather copies through buffers of its
own. Here the same bytes go straight from where they lie to where they belong: read from the other rank's memory, or
where that cannot be (`_peer_memory`), as plain sends and receives. Times: `python bench/exchange.py`. A reduction
holds what the others gave until it is waited for.

rank 0  |own|   1   |   2   |   full                 |own| + what 1 gave + what 2 gave -> shard of rank 0
            '---> to 1  '---> to 2
"""

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ._peer_memory import Peers, connect

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]

MAX_RANKS = 4  # each sends to each
MIN_BYTES = 1 << 20  # below, one call is cheaper than many
# One for each group: its ranks make the same calls in the same order, ranks of other groups need not.
_wires: "weakref.WeakKeyDictionary[dist.ProcessGroup, Peers | Sends]" = weakref.WeakKeyDictionary()


class Exchange:
    """Sends and receives under way, and what is to be done when they are over. Waits like a torch work."""

    def __init__(self, works: list[Any], finish: Callable[[], None]) -> None:
        self.works = works
        self._finish = finish

    def wait(self) -> None:
        """Block until all is there; once."""
        for work in self.works:
            work.wait()
        self._finish()


def received_bytes(full_bytes: int, ranks: int) -> int:
    """What a reduction of so many gathered bytes over gloo holds beside them while it is under way."""
    direct = 1 < ranks <= MAX_RANKS and full_bytes + full_bytes // ranks >= MIN_BYTES
    return full_bytes // ranks * (ranks - 1) if direct else 0


def pays(pairs: Pairs, group: dist.ProcessGroup) -> bool:
    """Whether to go this way; the same answer on all ranks."""
    large = max(pairs[0], key=torch.Tensor.numel)
    return (
        large.device.type == "cpu"
        and 1 < group.size() <= MAX_RANKS
        and sum(max(one.nbytes, other.nbytes) for one, other in pairs) >= MIN_BYTES
        and dist.get_backend(group) == "gloo"
    )


def all_gather(pairs: Pairs, group: dist.ProcessGroup) -> Exchange:
    """Start giving every `send` to all ranks, in the order of ranks in `receive`."""
    rank, works = group.rank(), list[Any]()
    for receive, send in pairs:
        parts = receive.chunk(group.size())
        others = _others(group)
        works.append(
            _wire(group).exchange(dict.fromkeys(others, send), {other: parts[other] for other in others})
        )
        if parts[rank].data_ptr() != send.data_ptr():
            parts[rank].copy_(send)
    return Exchange(works, lambda: None)


def reduce_scatter(pairs: Pairs, average: bool, group: dist.ProcessGroup) -> Exchange:
    """Start summing every `send` over the ranks, each rank's part into its `receive`."""
    rank, works, sums = group.rank(), list[Any](), list[tuple[torch.Tensor, ...]]()
    for receive, send in pairs:
        parts = send.chunk(group.size())
        others = _others(group)
        came = torch.empty(len(others), receive.numel(), dtype=send.dtype)
        takes = dict(zip(others, came, strict=True))
        works.append(_wire(group).exchange({other: parts[other] for other in others}, takes))
        sums.append((receive, parts[rank], came))

    def finish() -> None:
        for receive, own, came in sums:
            torch.add(own, came[0], out=receive)
            for row in came[1:]:
                receive.add_(row)
            if average:
                receive.div_(group.size())
        sums.clear()

    return Exchange(works, finish)


def _wire(group: dist.ProcessGroup) -> "Peers | Sends":
    """How tensors get from rank to rank; all ranks of the group agree on it when it is first asked for."""
    wire = _wires.get(group)
    if wire is None:
        wire = _wires[group] = connect(group) or Sends(group)
    return wire


class Sends:
    """What `Peers` does, with the group's own sends and receives."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._tags: Iterator[int] = itertools.count(1)

    def exchange(self, gives: Mapping[int, torch.Tensor], takes: Mapping[int, torch.Tensor]) -> "Works":
        """Start giving each peer one tensor, and taking one of each."""
        group, tag = self._group(), next(self._tags)
        works = [dist.irecv(to, group=group, group_src=peer, tag=tag) for peer, to in takes.items()]
        works += [dist.isend(of, group=group, group_dst=peer, tag=tag) for peer, of in gives.items()]
        return Works(works)


class Works:
    """Several works as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Block until all are over."""
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        """Whether `wait` would not block."""
        return all(work.is_completed() for work in self._works)


def _others(group: dist.ProcessGroup) -> list[int]:
    """The other ranks, those behind this one first, so that not all begin with the same."""
    rank, size = group.rank(), group.size()
    return [(rank - step) % size for step in range(1, size)]
