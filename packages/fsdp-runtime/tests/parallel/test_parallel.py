"""Every case of parallelism gives the loss, gradients and norm of one process, with exactly the collectives it says."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from harness import RANKS, all_cases, problems, run_cases, worst_of

from ragged_shard.testing import run_ranks

pytestmark = pytest.mark.long

CASES = all_cases()
PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
SECTIONS = list(dict.fromkeys(entry.section for entry in CASES.values()))


@pytest.mark.parametrize("section", SECTIONS)
def test_cases_give_the_numbers_of_one_process(section: str) -> None:
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    names = [name for name, entry in CASES.items() if entry.section == section and version >= entry.since]
    if not names:
        pytest.skip(f"torch {torch.__version__} has not got what these need")
    found = run_ranks(RANKS, run_cases, names, "ours", timeout=240)
    assert not [
        text for name in names for text in problems(CASES[name], worst_of([one[name] for one in found]))
    ]


@pytest.mark.skipif(not PAGE.exists(), reason="the page is in the source tree, not in a wheel")
def test_every_section_is_on_the_page() -> None:
    page = PAGE.read_text()
    sizes = Counter(entry.section for entry in CASES.values())
    assert not [section for section, size in sizes.items() if f"| {section} | {size} |" not in page], (
        "stale: run `python -m checks.parallel`"
    )
