"""150 programs of fixed seeds, and files: all that have failed once, and what these seeds do not draw.

The programs that are not `long` have each name that any of the 150 has. `./run programs` draws new ones.
"""

from pathlib import Path

import pytest

from ragged_shard.testing import preload

from .program import draw, names, read
from .runs import outcome

preload("fsdp_runtime", "tests.programs.runs")

FOUND = sorted((Path(__file__).parent / "found").glob("*.txt"))
AT_ONCE = 10
LIMIT = 100.0  # seconds: the machine may be loaded


def cases(count: int) -> list[object]:
    """Seeds, some at a time: first the fewest that have all names of layers, actions and options, greedily chosen."""
    programs = {seed: draw(seed) for seed in range(count)}
    drawn = {
        seed: names(program)
        for seed, program in programs.items()
        if not program.departs  # which wait until collectives time out
    }
    chosen: list[int] = []
    missing = set[str]().union(*drawn.values())
    while missing:
        chosen.append(max(drawn, key=lambda seed: len(drawn[seed] & missing)))
        missing -= drawn[chosen[-1]]
    others = [seed for seed in programs if seed not in chosen]
    return [
        pytest.param(seeds[first : first + AT_ONCE], marks=marks, id=str(seeds[first]))
        for seeds, marks in ((chosen, []), (others, [pytest.mark.long]))
        for first in range(0, len(seeds), AT_ONCE)
    ]


@pytest.mark.parametrize("seeds", cases(150))
def test_drawn_programs_have_no_fault(seeds: list[int]) -> None:
    faults = {}
    for seed in seeds:
        if fault := outcome(draw(seed), limit=LIMIT).fault:
            faults[repr(draw(seed))] = fault
    assert not faults


@pytest.mark.parametrize("seeds", cases(60))
def test_drawn_programs_use_no_memory_without_an_order(seeds: list[int]) -> None:
    faults = {seed: outcome(draw(seed), simulated=True).fault for seed in seeds}
    assert faults == dict.fromkeys(seeds, "")


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_programs_of_files_have_no_fault(path: Path) -> None:
    program = read(path.read_text())
    assert outcome(program, limit=LIMIT).fault == ""
    assert outcome(program, simulated=True).fault == ""
