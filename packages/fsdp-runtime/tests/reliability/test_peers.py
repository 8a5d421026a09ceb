"""A short form of `peers.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from peers import Outcome

pytestmark = pytest.mark.long


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its ranks")
def test_a_rank_with_another_model_raises_on_both_ranks_with_ours_and_not_with_fsdp2():
    command = [sys.executable, str(Path(__file__).with_name("peers.py")), "another width"]
    done = subprocess.run(
        [*command, "--systems", "fsdp2", "ours"], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    theirs, ours, *_ = done.stdout.splitlines()
    assert theirs.startswith("another width, fsdp2: 1 of 2 raise")
    assert ours.startswith("another width, ours: 2 of 2 raise")
    assert "tensor up.weight is (32, 16) in blocks rows:1 here" in ours


def test_an_outcome_says_who_raised_and_what_is_wrong_though_nobody_did():
    raised = Outcome(("A: b", None), (), ("SIGABRT",), 1.0, report="late | 2 s")
    assert raised.summary == "1 of 2 raise, 1.0 s, **SIGABRT**, after a report"
    assert str(raised) == f"{raised.summary}: `A: b`: `late \\| 2 s`"
    wrong = Outcome((None, None), (), (), 1.0, wrong="the loss is 1")
    assert str(wrong) == "**silently wrong**: the loss is 1"
    assert str(Outcome((None, None), (0,), (), 40.0)) == "**hangs** for longer than 40 s"
