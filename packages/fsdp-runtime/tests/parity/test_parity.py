"""Ten steps on 1 to 4 ranks end where one process ends, and where FSDP2 ends, for each feature of each model."""

import pytest
from parity_matrix import runs_of
from parity_runs import Report, Run, compare_all

from ragged_shard._torch_compat import TORCH_VERSION
from ragged_shard.testing import run_ranks

pytestmark = pytest.mark.long

# FSDP2 of torch 2.15 adds up bf16 gradients of microbatches, and of most parameters that are used twice, in fp32: it is
# compared by its numbers alone there.
SUMS_ALIKE = TORCH_VERSION < (2, 14)


def problems(run: Run, report: Report) -> list[str]:
    found = []
    if not run.low and report.losses > 1e-6:
        found.append(f"losses {report.losses:.1e} from one process (FSDP2 {report.fsdp2_losses:.1e})")
    if not run.low and run.optimizer == "sgd" and report.parameters > 1e-5:
        found.append(
            f"parameters {report.parameters:.1e} from one process (FSDP2 {report.fsdp2_parameters:.1e})"
        )
    if report.losses > 2 * report.fsdp2_losses + 1e-6:
        found.append(f"losses {report.losses:.1e} from one process, FSDP2 {report.fsdp2_losses:.1e}")
    if report.parameters > 2 * report.fsdp2_parameters + 1e-5:
        found.append(
            f"parameters {report.parameters:.1e} from one process, FSDP2 {report.fsdp2_parameters:.1e}"
        )
    if not run.low and report.between_losses > 1e-6:
        found.append(f"losses {report.between_losses:.1e} from FSDP2's")
    return [f"{run}: {text}" for text in found]


# `checks/parity.py` runs all models, and all features on all numbers of ranks.
@pytest.mark.parametrize("model", ["dense", "more experts, stacked"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ten_steps_end_where_one_process_and_fsdp2_end(model: str, ranks: int) -> None:
    runs = runs_of(model, ranks)[:: 1 if ranks < 3 else 2]
    reports = run_ranks(ranks, compare_all, runs, timeout=280)[0]
    if ranks <= 2:  # a sum of two is the same in either order
        differing = [run for run, report in zip(runs, reports, strict=True) if not report.same_bits]
        assert [str(run) for run in differing if SUMS_ALIKE or not run.low] == []
    assert not [text for run, report in zip(runs, reports, strict=True) for text in problems(run, report)]
