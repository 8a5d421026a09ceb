"""A collective that is late: which one, and which ranks are missing."""

import contextlib
import json
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


def wait_for(happened, seconds=60.0):
    until = time.monotonic() + seconds
    while not happened() and time.monotonic() < until:
        time.sleep(0.02)


def train(folder, stall, transport, after=AFTER, look=str):
    """Three steps on each rank; before the last one, one rank stalls. Returns what this rank reported."""
    rank, size = dist.get_rank(), dist.get_world_size()
    reports: list[str] = []

    def report(line):
        reports.append(line)
        if "missing: rank" in line:
            seen = json.dumps(look(folder))
            with contextlib.suppress(FileExistsError), (folder / "reported").open("x") as file:
                file.write(seen)

    model: Any = fully_shard(torch.nn.Sequential(torch.nn.Linear(64, 64)), transport=transport)
    store = dist.PrefixStore("watchdog", dist.FileStore(f"{folder}/store", size))
    with Watchdog(store, rank, size, after=after, every=0.1, report=report, folder=folder):
        for step in range(3):
            if step == 2 and rank == size - 1:
                stall(folder)
            model(torch.ones(2, 64)).sum().backward()
    return reports


def sleep(folder):
    path, until = str(folder / "reported"), time.monotonic() + 60
    while (
        not os.access(path, os.F_OK) and time.monotonic() < until
    ):  # in C, so that this is the innermost function
        time.sleep(0.02)


def freeze(folder):
    subprocess.Popen(["sh", "-c", f"sleep {6 * AFTER}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def rush(folder):
    """Not late at all."""


def last_collectives(folder):
    """Name and number of the last collective in each rank's flight recorder."""
    traces = [json.loads((folder / f"flight-recorder-rank-{rank}.json").read_text()) for rank in range(3)]
    last = [trace["others"]["entries"][-1] for trace in traces]
    return [(entry["profiling_name"], entry["collective_seq_id"]) for entry in last]


@pytest.mark.parametrize("transport", ["collectives", pytest.param("auto", marks=pytest.mark.long)])
def test_a_late_rank_is_named_with_its_line_and_its_flight_recorder(tmp_path, transport):
    recorded = transport == "collectives"
    look = last_collectives if recorded else str
    reports = run_ranks(3, train, tmp_path, sleep, transport, AFTER, look)
    line = next(line for of_rank in reports for line in of_rank if "missing: rank 2 (" in line)
    number = re.search(r"for all_gather of Sequential number (\d+)", line)
    assert number
    assert "ranks 0, 1 wait in it" in line
    assert f"and has started {int(number[1]) - 1}" in line
    assert "in sleep" in line
    if recorded:
        named = [f"; flight recorder: {tmp_path}/flight-recorder-rank-{rank}.json" for rank in range(3)]
        assert all(named[rank] in line for rank in range(3) for line in reports[rank])
        waiting, also_waiting, missing = json.loads((tmp_path / "reported").read_text())
        assert waiting == also_waiting == ["gloo:all_gather", missing[1] + 1]


def test_a_report_says_why_there_is_no_flight_recorder(monkeypatch, tmp_path):
    for traces, text in (
        ({}, "is empty"),
        ({"NCCL": {"entries": [1]}}, "cannot be written: .* No such file"),
    ):
        monkeypatch.setattr("fsdp_runtime.watchdog.flight_recorders", lambda traces=traces: traces)
        assert re.search(f"flight recorder {text}", first_report(Store(), folder=tmp_path / "gone"))


@pytest.mark.long
def test_a_frozen_rank_is_named_as_one_that_does_not_answer(tmp_path):
    reports = run_ranks(2, train, tmp_path, freeze, "collectives")
    assert f"; no answer in 1.2 s from rank 1 ({socket.gethostname()}): stopped, ended" in reports[0][0]
    assert not reports[1]


def test_nothing_is_reported_while_ranks_go_on(tmp_path):
    assert run_ranks(2, train, tmp_path, rush, "auto", after=20.0) == [[], []]


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


def first_report(store, every=0.05, **options):
    """The first report of a rank that makes no progress in step 7."""
    reports: list[str] = []
    fake: Any = store
    watchdog = Watchdog(fake, 0, 2, after=0.2, every=every, report=reports.append, **options)
    watchdog.beat("step 7")
    with watchdog:
        wait_for(lambda: reports)
    return reports[0]


def test_a_step_without_a_collective_is_late_too():
    line = first_report(Store())
    assert "has made no progress" in line
    assert "in step 7" in line
    assert "test_watchdog.py" in line
    assert "no answer in 1.1 s from rank 1: " in line
    assert "missing" not in line  # it may be alive
    assert line.endswith("or too busy to answer")


def test_a_rank_that_is_not_late_asks_the_store_one_thing_a_look():
    fake: Any = Store()
    with Watchdog(fake, 0, 2, after=60, every=0.01):
        wait_for(lambda: len(fake.calls) >= 5)
    assert set(fake.calls) == {"check"}
    assert fake.values.keys() == {"host/0"}


def test_a_store_that_fails_or_hangs_holds_up_neither_report_nor_exit():
    store = Store()
    store.broken = True
    assert "the other ranks cannot be asked: connection reset by peer" in first_report(store, every=0.3)
    never = threading.Event()
    answers: list[bool] = []
    store.check = lambda keys: answers.append(never.wait(60))
    line = first_report(store)
    assert not answers  # leaving has not waited for it
    never.set()
    assert "in step 7" in line
    assert "the other ranks cannot be asked: the store has not answered for " in line
