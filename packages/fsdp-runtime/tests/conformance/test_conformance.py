"""FSDP2's documented behaviors, each run with torch's implementation and with this one."""

from pathlib import Path

import pytest
import torch
from conformance_registry import IMPLEMENTATIONS, TORCH_NOW, TORCHS, all_cases, run_case, run_refusals, table

from ragged_shard.testing import run_ranks

CASES = all_cases()
TABLE = Path(__file__).parents[2] / "CONFORMANCE.md"


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.long] * (name == "fsdp2")) for name in IMPLEMENTATIONS]
)
def implementation(request: pytest.FixtureRequest) -> str:
    if request.param == "fsdp2" and not torch.__version__.startswith(TORCHS):
        pytest.skip(
            f"the cases say what FSDP2 does in torch {' and '.join(TORCHS)}, this is {torch.__version__}"
        )
    return request.param


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name == "compiled"))  # starting dynamo takes longest
        for name, entry in CASES.items()
        if not entry.refusal
    ],
)
def test_behavior(name: str, implementation: str, tmp_path: Path) -> None:
    entry = CASES[name]
    if entry.needs(implementation) > TORCH_NOW:
        pytest.skip(f"{implementation} of torch {torch.__version__} has not got what this needs")
    for ranks in entry.ranks:
        run_ranks(ranks, run_case, name, implementation, str(tmp_path), timeout=entry.timeout, seed=0)


def test_what_is_refused_is_refused_on_every_rank(implementation: str) -> None:
    assert run_ranks(2, run_refusals, implementation, seed=0) == [[], []]


@pytest.mark.skipif(not TABLE.exists(), reason="the table is in the source tree, not in a wheel")
def test_the_table_is_what_the_cases_say() -> None:
    assert TABLE.read_text() == table(), "stale: run `python -m checks.conformance`"
