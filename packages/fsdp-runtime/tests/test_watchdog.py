"""A collective that is late: which one, and which ranks are missing."""

import os
import re
import signal
import socket
import subprocess
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_runtime import Watchdog, fully_shard
from ragged_shard.testing import run_ranks

AFTER = 1.0


def train(folder, stall, transport):
    """Three steps on each rank; before the last one, one rank stalls. Returns what this rank reported."""
    rank, size = dist.get_rank(), dist.get_world_size()
    reports: list[str] = []
    model: Any = fully_shard(torch.nn.Sequential(torch.nn.Linear(64, 64)), transport=transport)
    store = dist.PrefixStore("watchdog", dist.FileStore(f"{folder}/store", size))
    with Watchdog(store, rank, size, after=AFTER, every=0.1, report=reports.append):
        for step in range(3):
            if step == 2 and rank == size - 1:
                stall()
            model(torch.ones(2, 64)).sum().backward()
    return reports


def sleep():
    time.sleep(3 * AFTER)


def freeze():
    subprocess.Popen(["sh", "-c", f"sleep {6 * AFTER}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def rush():
    """Not late at all."""


@pytest.mark.parametrize("transport", ["collectives", pytest.param("auto", marks=pytest.mark.long)])
def test_a_rank_that_comes_late_is_named_with_the_line_where_it_is(tmp_path, transport):
    reports = run_ranks(3, train, str(tmp_path), sleep, transport)
    (line,) = [line for of_rank in reports for line in of_rank][:1]
    number = re.search(r"for all_gather of Sequential number (\d+)", line)
    assert number
    assert "ranks 0, 1 wait in it" in line
    assert "missing: rank 2 (" in line
    assert f"and has started {int(number[1]) - 1}" in line
    assert "in sleep" in line


@pytest.mark.long
def test_a_frozen_rank_is_named_as_one_that_does_not_answer(tmp_path):
    reports = run_ranks(2, train, str(tmp_path), freeze, "collectives")
    assert f"; no answer in 1.2 s from rank 1 ({socket.gethostname()}): stopped, ended" in reports[0][0]
    assert not reports[1]


def test_nothing_is_reported_while_ranks_go_on(tmp_path):
    assert run_ranks(2, train, str(tmp_path), rush, "auto") == [[], []]


class Store:
    """Keys and values; counts what is asked of it."""

    def __init__(self):
        self.values: dict[str, str] = {}
        self.calls: list[str] = []
        self.broken = False

    def check(self, keys):
        self.calls.append("check")
        if self.broken:
            raise RuntimeError("connection reset by peer")
        return all(key in self.values for key in keys)

    def get(self, key):
        return self.values[key].encode()

    def set(self, key, value):
        self.values[key] = value

    def compare_set(self, key, expected, value):
        if self.broken:
            raise RuntimeError("connection reset by peer")
        return self.values.setdefault(key, value).encode()


def watched(store, seconds, **options):
    reports: list[str] = []
    fake: Any = store
    with Watchdog(fake, 0, 2, after=0.2, every=0.05, report=reports.append, **options) as watchdog:
        watchdog.beat("step 7")
        time.sleep(seconds)
    return reports


def test_a_step_without_a_collective_is_late_too():
    line = watched(Store(), 1.5)[0]
    assert "has made no progress" in line
    assert "in step 7" in line
    assert "test_watchdog.py" in line
    assert "no answer in 1.1 s from rank 1: " in line
    assert "missing" not in line  # it may be alive
    assert line.endswith("or too busy to answer")


def test_beats_keep_a_rank_from_being_late():
    reports: list[str] = []
    fake: Any = Store()
    with Watchdog(fake, 0, 2, after=0.5, every=0.05, report=reports.append) as watchdog:
        for step in range(10):
            watchdog.beat(f"step {step}")
            time.sleep(0.1)
    assert not reports


def test_a_rank_that_is_not_late_asks_the_store_one_thing_a_look():
    fake: Any = Store()
    with Watchdog(fake, 0, 2, after=60, every=0.01):
        time.sleep(0.3)
    assert set(fake.calls) == {"check"}
    assert fake.values.keys() == {"host/0"}


def test_without_the_store_a_late_rank_says_what_it_knows():
    store = Store()
    store.broken = True
    fake: Any = store
    reports: list[str] = []
    watchdog = Watchdog(fake, 0, 2, after=0.2, every=0.3, report=reports.append)
    watchdog.beat("step 7")
    with watchdog:
        time.sleep(0.8)
    assert reports
    assert all("the other ranks cannot be asked: connection reset by peer" in line for line in reports)


def test_a_store_that_does_not_answer_holds_up_neither_the_report_nor_leaving():
    store = Store()
    never = threading.Event()
    answers: list[bool] = []
    store.check = lambda keys: answers.append(never.wait(60))
    line = watched(store, 2)[0]
    assert not answers  # leaving has not waited for it
    never.set()
    assert "in step 7" in line
    assert "the other ranks cannot be asked: the store has not answered for " in line


@pytest.mark.parametrize("seconds", [{"after": 0}, {"after": 1, "every": -1}])
def test_times_must_be_positive(seconds):
    fake: Any = Store()
    with pytest.raises(ValueError, match="expected more than 0"):
        Watchdog(fake, 0, 2, **seconds)
