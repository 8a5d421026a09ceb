"""Ten steps on a CUDA device end where plain training and FSDP2 end. `checks/parity.py` compares more on CPU ranks."""

from dataclasses import replace

import pytest
import torch
from parity_matrix import MODELS, runs_of
from parity_runs import Report, Run, compare_all

from ragged_shard.testing import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]


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


@pytest.mark.parametrize("model", [model for model in MODELS if runs_of(model, 1)])
def test_ten_steps_on_one_device_end_where_plain_training_and_fsdp2_end(model: str) -> None:
    runs = [replace(run, device="cuda") for run in runs_of(model, 1)]
    reports = run_ranks(1, compare_all, runs, device="cuda", timeout=280)[0]
    assert not [text for run, report in zip(runs, reports, strict=True) for text in problems(run, report)]
