"""150 programs of fixed seeds, and all that have failed once. `./run programs` draws new ones."""

from pathlib import Path

import pytest

from ragged_shard.testing import preload

from .program import draw, read
from .runs import outcome

preload("fsdp_runtime", "tests.programs.runs")

FOUND = sorted((Path(__file__).parent / "found").glob("*.txt"))
AT_ONCE = 10
LIMIT = 100.0  # seconds: the machine may be loaded


@pytest.mark.parametrize("first", range(0, 150, AT_ONCE))
def test_drawn_programs_have_no_fault(first: int) -> None:
    faults = {}
    for seed in range(first, first + AT_ONCE):
        if fault := outcome(draw(seed), limit=LIMIT).fault:
            faults[repr(draw(seed))] = fault
    assert not faults


@pytest.mark.parametrize("first", range(0, 60, AT_ONCE))
def test_drawn_programs_use_no_memory_without_an_order(first: int) -> None:
    assert [outcome(draw(seed), simulated=True).fault for seed in range(first, first + AT_ONCE)] == [
        ""
    ] * AT_ONCE


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_programs_that_failed_once_have_no_fault(path: Path) -> None:
    program = read(path.read_text())
    assert outcome(program, limit=LIMIT).fault == ""
    assert outcome(program, simulated=True).fault == ""
