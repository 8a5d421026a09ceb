"""A short form of `soak.py`."""

import os

import pytest
from soak import Row, soak, table
from train.train_helpers import text_folder

pytestmark = pytest.mark.long

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")


@needs_proc
def test_resumes_in_one_process_leave_no_descriptors_and_threads_behind(tmp_path):
    text_folder(tmp_path)
    row = soak(tmp_path, "adamw", steps=60, part=10)
    assert row.steps == 60
    assert row.resumes >= 4
    assert row.descriptors[1] <= row.descriptors[0]
    assert row.threads[1] <= row.threads[0]
    assert "60 steps" in table([row], 10)


def test_what_grows_is_named():
    row = Row("x", 9, 1, (400.0, 450.0), (20.0, 22.0), (9.0, 10.0), (1.0, 2.0))
    named = [problem.split(" from ")[0] for problem in row.problems]
    assert named == ["memory", "descriptors", "threads", "host time"]
    assert Row("x", 9, 1, (400.0, 410.0), (22.0, 20.0), (9.0, 9.0), (1.0, 1.1)).problems == []
