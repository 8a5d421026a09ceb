"""Assigns jobs to ranks: longest processing time first, with affinity to the data that ranks already hold.

The problem is makespan scheduling on equal machines (NP-hard). Rules, in this order:

1. A job whose elements are all on one rank stays there: nothing is sent. Its FLOPs are that rank's first load.
2. The others, longest first (by FLOPs, then bytes, then order), go to the least loaded rank; loads (FLOPs, then bytes)
   are carried over all of them. A job with `among_holders` only goes to a rank that holds some of it.
3. Affinity: among the ranks that such a job would not load beyond a limit it goes to the one that holds most of it.
   A few limits are tried; the assignment that moves the fewest elements is kept among those whose largest load stays
   within 10 % of plain longest-first, and within plain longest-first or 4/3 of a lower bound, the larger of the two.

Without rule 1 and `among_holders` the largest load is at most 4/3 of the least possible: that is Graham's bound for
longest-first, and 4/3 of a lower bound is no more. Deterministic: integers and sorted ties only, so every rank computes
the same assignment without communication.
"""

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

_LIMITS = (100, 103, 106, 110, 120, 133)  # percent of the lower bound up to which affinity may load a rank


@dataclass(frozen=True)
class Job:
    """A unit of work that one rank must own."""

    flops: int  # its work in a step
    nbytes: int  # of all of it when it is sent
    holders: tuple[tuple[int, int], ...]  # (rank, elements) for each rank that holds some of it
    among_holders: bool = False  # whether its owner must be one of these

    @property
    def holder(self) -> int | None:
        """The one rank that holds all of it."""
        return self.holders[0][0] if len(self.holders) == 1 else None


def assign(jobs: Sequence[Job], num_ranks: int, before: Sequence[int] = ()) -> tuple[int, ...]:
    """An owner for each job, which are in an order that all ranks share. Time O(jobs log ranks).

    `before` are each rank's FLOPs from earlier assignments. See the module for the rules and their guarantees.
    """
    start = list(before) or [0] * num_ranks
    shared = [i for i, job in enumerate(jobs) if job.holder is None]
    order = sorted(shared, key=lambda i: (-jobs[i].flops, -jobs[i].nbytes, i))
    best = _place(jobs, start, order, None)
    if not order:
        return best
    largest, bound = max(loads(jobs, best, num_ranks, start)), lower_bound(jobs, num_ranks, start)
    cap = min(11 * largest // 10, max(largest, 4 * bound // 3))
    for percent in _LIMITS:
        result = _place(jobs, start, order, bound * percent // 100)
        if max(loads(jobs, result, num_ranks, start)) <= cap and moved(jobs, result) < moved(jobs, best):
            best = result
    return best


def _place(jobs: Sequence[Job], start: list[int], order: Sequence[int], limit: int | None) -> tuple[int, ...]:
    owners = [job.holder or 0 for job in jobs]
    flops, nbytes = list(start), [0] * len(start)

    def add(job: Job, rank: int) -> None:
        flops[rank] += job.flops
        nbytes[rank] += job.nbytes

    for job in jobs:
        if job.holder is not None:
            add(job, job.holder)
    heap = [(flops[r], nbytes[r], r) for r in range(len(start))]
    heapq.heapify(heap)
    for i in order:
        job = jobs[i]
        near = [] if limit is None else [(-n, r) for r, n in job.holders if flops[r] + job.flops <= limit]
        if near:
            rank = min(near)[1]
        elif job.among_holders:
            rank = min((flops[r], -n, r) for r, n in job.holders)[2]
        else:
            while heap[0][:2] != (flops[heap[0][2]], nbytes[heap[0][2]]):
                heapq.heappop(heap)  # stale heap entry: the load has grown since it was pushed
            rank = heap[0][2]
        owners[i] = rank
        add(job, rank)
        heapq.heappush(heap, (flops[rank], nbytes[rank], rank))
    return tuple(owners)


def loads(
    jobs: Sequence[Job], owners: Sequence[int], num_ranks: int, before: Sequence[int] = ()
) -> list[int]:
    """FLOPs of each rank."""
    result = list(before) or [0] * num_ranks
    for job, owner in zip(jobs, owners, strict=True):
        result[owner] += job.flops
    return result


def moved(jobs: Sequence[Job], owners: Sequence[int]) -> int:
    """Elements that are not at their owners, of all jobs."""
    return sum(sum(n for r, n in job.holders if r != owner) for job, owner in zip(jobs, owners, strict=True))


def lower_bound(jobs: Sequence[Job], num_ranks: int, before: Sequence[int] = ()) -> int:
    """Lower bound on the largest load: the mean, the largest job, two jobs that must share a rank, a fixed load."""
    fixed = list(before) or [0] * num_ranks
    sizes = sorted((job.flops for job in jobs), reverse=True)
    if not sizes:
        return max(fixed)
    total = sum(sizes) + sum(fixed)
    for job in jobs:
        if job.holder is not None:
            fixed[job.holder] += job.flops
    pair = sizes[num_ranks - 1] + sizes[num_ranks] if len(sizes) > num_ranks else 0
    return max(-(-total // num_ranks), sizes[0], pair, *fixed)


def digest(*values: object) -> int:
    """A number of 62 bits that is the same for equal values, in every process."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:8], "big") >> 2
