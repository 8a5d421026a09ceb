"""A short form of `chaos.py`, in a process of its own: it adopts all orphans below it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

linux_only = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads /proc")


@linux_only
def test_runs_that_are_killed_and_frozen_resume_to_the_same_curve_bit_for_bit():
    command = [sys.executable, str(Path(__file__).with_name("chaos.py")), "--attacks", "2", "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 attacks on runs of 2 and 3 ranks" in done.stdout
