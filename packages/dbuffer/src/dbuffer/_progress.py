"""Progress of this process's collectives, readable from other threads."""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist


class Waited(Protocol):
    """A collective that a thread waits for: a `Handle`."""

    title: str
    group: dist.ProcessGroup | None


# Written by the threads that start and wait for collectives, one operation at a time; read by any thread.
started: Counter[str] = Counter()  # by title
# By thread id: the collective, and `time.monotonic` at the begin of the wait.
waits: dict[int, tuple[Waited, float]] = {}


@dataclass(frozen=True)
class Waiting:
    """A thread of this process waits for a collective.

    Attributes:
        collective: title of the collective: "all_gather of layers.3". The same on all of its ranks.
        number: how many collectives of this title this process has started, this one included.
        ranks: its ranks, as ranks of the whole job.
        seconds: duration of the wait so far.
    """

    collective: str
    number: int
    ranks: tuple[int, ...]
    seconds: float


def waiting() -> list[Waiting]:
    """The collectives that threads of this process wait for now, the longest wait first. Does not communicate.

    On an accelerator a wait does not block the host, so there are none; torch has a watchdog for NCCL. Recording costs
    two dictionary writes per wait.
    """
    now = time.monotonic()
    waits_now = [
        Waiting(
            handle.title,
            started[handle.title],
            () if handle.group is None else tuple(dist.get_process_group_ranks(handle.group)),
            now - since,
        )
        for handle, since in waits.copy().values()
    ]
    return sorted(waits_now, key=lambda wait: -wait.seconds)


def times_started(collective: str) -> int:
    """How many collectives with a title (see `Waiting.collective`) this process has started."""
    return started[collective]
