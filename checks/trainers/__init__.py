"""The same cases in each trainer with this runtime and FSDP2: what `cases_*.py` answer.

`cases_X` has PACKAGE, without which its import raises pytest's Skipped, TITLE, RANKS and `run(system, folder)`,
which trains on a rank with "ours" or "fsdp2" and returns numbers for each of CASES. Another trainer is another file.
"""

import functools
import importlib
import tempfile
from pathlib import Path
from typing import Any

from ragged_shard.testing import run_ranks

CASES = {
    "loss": "losses of the steps",
    "clip": "norms before clipping",
    "accumulation": "losses with two microbatches a step, and how many reduce",
    "save": "norms of the tensors in the exported file, or of the full state dict",
    "resume, sharded": "losses after a sharded checkpoint was loaded into another model",
    "resume, full": "losses after a full one was loaded; torchtitan's and verl's has weights alone",
}
TRAINERS = sorted(f"{__name__}.{path.stem}" for path in Path(__file__).parent.glob("cases_*.py"))


def both(name: str, folder: Path) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    cases = importlib.import_module(name)
    return cases.run("ours", folder / "ours"), cases.run("fsdp2", folder / "fsdp2")


@functools.cache
def distances(name: str) -> dict[str, float]:
    """The largest relative distance of ours from FSDP2 in each case, over all ranks; infinite where a count differs."""
    cases: Any = importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(cases.RANKS, both, name, Path(folder), timeout=280)
    largest = dict.fromkeys(CASES, 0.0)
    for ours, theirs in ranks:
        assert ours.keys() == theirs.keys() == CASES.keys()
        for case in CASES:
            largest[case] = max(largest[case], _distance(ours[case], theirs[case]))
    return largest


def _distance(ours: list[float], theirs: list[float]) -> float:
    if len(ours) != len(theirs) or not ours:
        return float("inf")
    pairs = zip(ours, theirs, strict=True)
    return max(0.0 if a == b else abs(a - b) / max(abs(a), abs(b)) for a, b in pairs)
