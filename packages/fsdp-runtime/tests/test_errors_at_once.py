"""An error on one rank reaches the user at once, and the other ranks as fast as gloo can tell."""

import json
import subprocess
import sys

import pytest
from errors_at_once import BAD, CASES, LIMIT
from errors_at_once import __file__ as program

SOME = [
    (2, "forward", 4, "raise"), (3, "forward", 4, "kill"), (2, "evaluation", 4, "raise"), (3, "last hook", 1, "raise"),
    (2, "recomputation", 4, "kill"), (2, "export", 0, "raise"),
]  # fmt: skip


def check(cases):
    arguments = [",".join(map(str, case)) for case in cases]
    command = [sys.executable, program, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT * len(cases))
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(reports) == len(cases), result.stderr
    for report in reports:
        own = report["errors"][BAD]
        if report["how"] == "kill":
            assert own == "killed", report
        else:
            assert "bad batch" in own, report
        assert all(
            error and error != "killed" for rank, error in enumerate(report["errors"]) if rank != BAD
        ), report
        assert max(report["ended"]) < LIMIT, report


def test_an_error_or_a_death_of_one_rank_ends_every_rank_long_before_the_timeout():
    check(SOME)


@pytest.mark.long
@pytest.mark.parametrize("place", sorted({place for _, place, *_ in CASES}))
def test_an_error_at_any_place_in_any_pass_ends_every_rank_long_before_the_timeout(place):
    check([case for case in CASES if case[1] == place])
