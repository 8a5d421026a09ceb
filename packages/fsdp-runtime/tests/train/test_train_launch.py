"""Errors of ranks, and signals to a real run."""

import json
import os
import signal
import time

import pytest
from train_helpers import wait_for

from fsdp_runtime.train.checkpoint import latest, read_about
from fsdp_runtime.train.errors import lost_contact
from fsdp_runtime.train.report import read_metrics

pytestmark = pytest.mark.long


def test_errors_of_transports_say_that_contact_was_lost_and_others_do_not():
    reset = RuntimeError("[pair.cc:538] Read error [127.0.0.1]: Connection reset by peer")
    wrapped = ValueError("cannot save")
    wrapped.__cause__ = reset
    assert lost_contact(reset)
    assert lost_contact(wrapped)
    assert lost_contact(RuntimeError("all_gather of x failed: Application timeout caused pair closure"))
    assert not lost_contact(RuntimeError("size mismatch"))
    assert not lost_contact(OSError(28, "No space left on device"))


def ranks_of(running):
    found = {}
    with open(f"/proc/{running.pid}/task/{running.pid}/children") as file:
        children = [int(word) for word in file.read().split()]
    for child in children:
        with open(f"/proc/{child}/environ") as file:
            pairs = dict(pair.split("=", 1) for pair in file.read().split("\0") if "=" in pair)
        if "RANK" in pairs:  # else it is about to become one
            found[int(pairs["RANK"])] = child
    return found


linux_only = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads /proc")


@linux_only
def test_a_closed_pipe_ends_no_run_and_sigterm_to_a_rank_saves(folder, started):
    running = started("piped")
    assert running.stderr is not None
    running.stderr.readline()
    running.stderr.close()  # as `| head -1` does
    wait_for(lambda: len(read_metrics(folder / "piped" / "metrics.jsonl")) >= 20, running)
    os.kill(ranks_of(running)[1], signal.SIGTERM)
    assert running.wait(timeout=60) == 143
    newest = latest(folder / "piped")
    assert newest is not None
    assert read_about(newest)["step"] >= 20


@linux_only
def test_a_launcher_killed_at_start_leaves_no_rank_and_sighup_saves(folder, started):
    killed, running = started("killed"), started("hung-up")
    wait_for(lambda: len(ranks_of(killed)) == 2, killed)
    left = ranks_of(killed).values()
    killed.kill()
    killed.communicate()
    deadline = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in left):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    wait_for(lambda: len(read_metrics(folder / "hung-up" / "metrics.jsonl")) >= 3, running)
    running.send_signal(signal.SIGHUP)
    said = running.communicate(timeout=60)[1]
    assert running.returncode == 129, said
    assert latest(folder / "hung-up") is not None


@linux_only
def test_a_frozen_rank_ends_the_run_at_the_timeout_with_the_others_last_collectives(folder, started):
    running = started("frozen", "--timeout", "3")
    wait_for(lambda: len(read_metrics(folder / "frozen" / "metrics.jsonl")) >= 3, running)
    os.kill(ranks_of(running)[1], signal.SIGSTOP)
    said = running.communicate(timeout=60)[1]
    name = os.path.join("frozen", "flight-recorder-rank-0.json")
    assert f"; its last collectives: {name}" in said
    recorder = folder / name
    assert json.loads(recorder.read_text())["others"]["entries"]


@linux_only
def test_a_rank_that_aborts_prints_where_its_threads_were_and_is_named(folder, started):
    running = started("aborted")
    wait_for(lambda: len(read_metrics(folder / "aborted" / "metrics.jsonl")) >= 3, running)
    os.kill(ranks_of(running)[1], signal.SIGABRT)
    said = running.communicate(timeout=60)[1]
    assert "Fatal Python error: Aborted" in said
    assert "in run_rank" in said
    assert "rank 1 was ended by SIGABRT" in said
