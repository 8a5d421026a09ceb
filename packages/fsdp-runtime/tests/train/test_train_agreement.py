"""Ranks take their devices, meet and agree before they train."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from train_helpers import tiny, train, with_changes

from fsdp_runtime.train import TrainError
from fsdp_runtime.train.errors import check_agreement, check_model
from fsdp_runtime.train.hardware import own_device
from fsdp_runtime.train.launch import check_options, meet, run_rank
from ragged_shard import gather_from_ranks
from ragged_shard.testing import on_ranks


@on_ranks(3)
def test_options_versions_and_parameters_that_differ_are_named_with_their_ranks(tmp_path):
    config = tiny(tmp_path)
    odd = dist.get_rank() == 1
    sizes = (3, 4 + odd, 3)
    model = torch.nn.Sequential(*(torch.nn.Linear(2, size) for size in sizes))
    check_options(config)
    check_options(with_changes(config, out=str(odd), data=(str(odd),)))
    cases: list[tuple[Any, Any, str]] = [
        (check_options, with_changes(config, batch=12 + 6 * odd), "--batch: 12 on ranks 0, 2; 18 on rank 1"),
        (check_options, with_changes(config, resume=odd), "--resume: False on ranks 0, 2; True on rank 1"),
        (check_agreement, {"triton": "3.7"} if odd else {}, "triton: absent on ranks 0, 2; 3.7 on rank 1"),
        (check_model, model, "parameter 2: 1.weight (4, 2) torch.float32 on ranks 0, 2; "
                             "1.weight (5, 2) torch.float32 on rank 1"),
    ]  # fmt: skip
    for check, value, message in cases:
        with pytest.raises(TrainError) as error:
            check(value)
        assert str(error.value) == f"ranks do not agree on {message}"


@on_ranks(2)
def test_data_that_differs_is_named_before_the_first_step(folder, tmp_path):
    config = tiny(folder)
    if dist.get_rank() == 1:
        config = with_changes(config, data=(str(folder / "text" / "1*.py"),))
    message = train(config, tmp_path)
    assert message.startswith("ranks do not agree on --data (a digest of names and sizes): ")
    assert gather_from_ranks(message) == [message] * 2


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
    rounds = [meet_all(store, range(ranks), ranks) for ranks in (4, 4, 2, 3)]
    assert [len(set(keys)) for keys in rounds] == [1] * 4
    assert len({keys[0] for keys in rounds}) == 4


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


@pytest.mark.parametrize(("count", "local_rank", "index"), [(8, 3, 3), (1, 0, 0), (1, 7, 0), (2, 2, None)])
def test_a_rank_takes_its_own_device_or_the_only_one(monkeypatch, count, local_rank, index):
    chosen: list[int] = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    if index is None:
        with pytest.raises(TrainError, match="local rank 2 has no cuda device: 2 are visible"):
            own_device("cuda", local_rank)
    else:
        assert own_device("cuda", local_rank) == torch.device("cuda", index)
        assert chosen == [index]
