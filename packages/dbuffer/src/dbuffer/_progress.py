"""How far this process is with its collectives, for whoever looks on from another thread."""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist


class Waited(Protocol):
    """What a thread waits for: a `Handle`."""

    title: str
    group: dist.ProcessGroup | None


# Written by the threads that start collectives and wait for them, with one operation each time; read by any other.
started: Counter[str] = Counter()  # by title
waits: dict[
    int, tuple[Waited, float]
] = {}  # by the identity of the thread; with the `time.monotonic` of its begin


@dataclass(frozen=True)
class Waiting:
    """A thread of this process waits for a collective.

    Attributes:
        collective: as errors name it: "all_gather of layers.3". The same on all of its ranks.
        number: how many collectives of this name this process has started, this one included.
        ranks: who takes part, as ranks of the whole job.
        seconds: how long the wait has lasted.
    """

    collective: str
    number: int
    ranks: tuple[int, ...]
    seconds: float


def waiting() -> list[Waiting]:
    """The collectives that threads of this process wait for now, the longest wait first. Does not communicate.

    On an accelerator a wait does not block the host, so nothing is seen there; torch has a watchdog of its own for
    NCCL. It costs a wait two writes into a dictionary, whether anybody calls this or not.
    """
    now = time.monotonic()
    found = [
        Waiting(
            handle.title,
            started[handle.title],
            () if handle.group is None else tuple(dist.get_process_group_ranks(handle.group)),
            now - since,
        )
        for handle, since in waits.copy().values()
    ]
    return sorted(found, key=lambda one: -one.seconds)


def times_started(collective: str) -> int:
    """How many collectives of a name (see `Waiting.collective`) this process has started."""
    return started[collective]
