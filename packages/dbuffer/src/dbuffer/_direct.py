"""Gathers and reductions over gloo as plain sends and receives, for few ranks and much data.

gloo reduces a copy of the whole input over all ranks and hands out a slice; its gather copies through buffers of its
own. Here the same bytes are sent straight from where they lie and received straight to where they belong (times:
`python bench/exchange.py`). A reduction holds what the others send until it is waited for.

rank 0  |own|   1   |   2   |   full                 |own| + received from 1 + received from 2 -> shard of rank 0
            '---> to 1  '---> to 2
"""

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]

MAX_RANKS = 4  # each sends to each
MIN_BYTES = 1 << 20  # below, one call is cheaper than many
# One count for each group: its ranks make the same calls in the same order, ranks of other groups need not.
_tags: "weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]]" = weakref.WeakKeyDictionary()


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
        parts, tag = receive.chunk(group.size()), _next_tag(group)
        others = _others(group)
        works += [dist.irecv(parts[other], group=group, group_src=other, tag=tag) for other in others]
        works += [dist.isend(send, group=group, group_dst=other, tag=tag) for other in others]
        if parts[rank].data_ptr() != send.data_ptr():
            parts[rank].copy_(send)
    return Exchange(works, lambda: None)


def reduce_scatter(pairs: Pairs, average: bool, group: dist.ProcessGroup) -> Exchange:
    """Start summing every `send` over the ranks, each rank's part into its `receive`."""
    rank, works, sums = group.rank(), list[Any](), list[tuple[torch.Tensor, ...]]()
    for receive, send in pairs:
        parts, tag = send.chunk(group.size()), _next_tag(group)
        others = _others(group)
        came = torch.empty(len(others), receive.numel(), dtype=send.dtype)
        works += [
            dist.irecv(row, group=group, group_src=other, tag=tag)
            for row, other in zip(came, others, strict=True)
        ]
        works += [dist.isend(parts[other], group=group, group_dst=other, tag=tag) for other in others]
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


def _next_tag(group: dist.ProcessGroup) -> int:
    return next(_tags.setdefault(group, itertools.count(1)))


def _others(group: dist.ProcessGroup) -> list[int]:
    """The other ranks, those behind this one first, so that not all begin with the same."""
    rank, size = group.rank(), group.size()
    return [(rank - step) % size for step in range(1, size)]
