"""Ranks that are started again find each other, whatever the ranks before them left in the store."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from train_helpers import tiny

from fsdp_runtime.train.launch import meet, run_rank


@pytest.fixture
def store():
    return dist.HashStore()


def meet_all(store, ranks, world_size, timeout=20.0):
    """What `meet` gives on each of these ranks, or raises there."""

    def one(rank):
        try:
            return meet(store, rank, world_size, timeout)
        except ConnectionError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(one, ranks))


def test_all_ranks_have_the_same_key_and_each_round_another(store):
    rounds = [meet_all(store, range(4), 4) for _ in range(3)]
    assert [len(set(keys)) for keys in rounds] == [1, 1, 1]
    assert len({keys[0] for keys in rounds}) == 3


def test_a_round_of_fewer_or_more_ranks_meets_in_the_same_store(store):
    for world_size in (4, 2, 3):
        assert len(set(meet_all(store, range(world_size), world_size))) == 1


def test_ranks_of_a_round_that_never_met_do_not_disturb_the_next(store):
    left = meet_all(store, [1, 2], 3, timeout=0.2)  # their rank 0 never came
    assert left == ["rank 0 has not answered rank 1 for 0.2 s", "rank 0 has not answered rank 2 for 0.2 s"]
    left = meet_all(store, [0, 2], 3, timeout=0.5)
    assert left[0] == "rank 1 did not come within 0.5 s"  # what is left of an earlier rank 1 does not count
    assert len(set(meet_all(store, range(3), 3))) == 1


def test_a_rank_that_comes_late_is_waited_for(store):
    keys = []
    late = threading.Timer(0.5, lambda: keys.append(meet(store, 1, 2, 20.0)))
    late.start()
    keys.append(meet(store, 0, 2, 20.0))
    late.join()
    assert len(set(keys)) == 1


def test_sigterm_ends_a_rank_of_torchruns_that_waits_for_the_others(tmp_path, monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    variables = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    for name, value in {**variables, "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        monkeypatch.setenv(name, str(value))
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        run_rank(tiny(tmp_path), quiet=True)
        os._exit(0)
    until = time.monotonic() + 30
    while not store.check(["fsdp-train-meeting/hello/1"]):
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(child, signal.SIGTERM)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
