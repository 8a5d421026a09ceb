"""The parity suite on one CUDA device over NCCL."""

from dataclasses import replace

import pytest
import torch
from parity_matrix import MODELS, runs_of
from parity_runs import compare_all
from test_parity import problems

from ragged_shard.testing import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]


@pytest.mark.parametrize("model", [model for model in MODELS if runs_of(model, 1)])
def test_ten_steps_on_one_device_end_where_plain_training_and_fsdp2_end(model: str) -> None:
    runs = [replace(run, device="cuda") for run in runs_of(model, 1)]
    reports = run_ranks(1, compare_all, runs, device="cuda", timeout=280)[0]
    assert not [text for run, report in zip(runs, reports, strict=True) for text in problems(run, report)]
