"""How ranks that torchrun started find each other in a store that has outlived an earlier start.

torchrun's agents keep one store for all rounds of a job, with what gloo and NCCL wrote there about ranks that have
ended since, and hosts count restarts on their own: nothing in the environment tells two rounds apart. So the ranks
meet under a key of their own:

    rank r                                 the store                       rank 0
    hello/r = a word of its own  --------> hello/r ----------------------> reads it
    waits for answer/WORD        <-------- answer/WORD = the key <-------- gives the round's key
    KEY/r = here                 --------> KEY/r ------------------------> waits for KEY/1 ... KEY/n

What a rank of an earlier round left gets an answer that nobody reads.
"""

import os
import secrets
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from .errors import listed

_LOOK = 0.05  # seconds between two looks


def outlives_a_start() -> bool:
    """Whether torchrun's agent serves the ranks' store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def meet_in_agents_store(rank: int, world_size: int, timeout: float) -> Store:
    """A part of the agent's store that is this round's alone. Called on every rank.

    Raises:
        ConnectionError: after `timeout` seconds; on rank 0 with the ranks that did not come.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    allowed = timedelta(seconds=timeout)
    store = dist.TCPStore(address, port, is_master=False, timeout=allowed)  # type: ignore[attr-defined]
    key = meet(PrefixStore("fsdp-train-meeting", store), rank, world_size, timeout)
    return PrefixStore(f"fsdp-train-{key}", store)


def meet(store: Store, rank: int, world_size: int, timeout: float) -> str:
    """The round's key, the same on every rank. See `meet_in_agents_store`."""
    word, looks = secrets.token_hex(8), _looks(timeout)
    if rank:
        store.set(f"hello/{rank}", word)
        while not store.check([f"answer/{word}"]):
            if not next(looks, False):
                raise ConnectionError(f"rank 0 has not answered rank {rank} for {timeout:g} s")
        key = store.get(f"answer/{word}").decode()
        store.set(f"{key}/{rank}", "here")
        return key
    missing = list(range(1, world_size))
    while missing := [other for other in missing if not store.check([f"{word}/{other}"])]:
        for other in missing:
            if store.check([f"hello/{other}"]):
                store.set(f"answer/{store.get(f'hello/{other}').decode()}", word)
        if not next(looks, False):
            raise ConnectionError(f"{listed(missing)} did not come within {timeout:g} s")
    return word


def _looks(timeout: float) -> Iterator[bool]:
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        time.sleep(_LOOK)
        yield True
