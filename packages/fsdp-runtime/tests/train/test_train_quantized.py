"""Runs whose weights and gradients travel quantized."""

import shutil

import pytest
from train_helpers import losses, read_model, tiny, train, with_changes

from fsdp_runtime.train.plan import make_plan
from fsdp_runtime.train.report import METRICS
from ragged_shard.testing import run_ranks


@pytest.fixture
def losses_with(folder, tmp_path):
    """Trains on two ranks, and returns the losses."""

    def run(**changes):
        out = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        summary = run_ranks(2, train, tiny(folder, **{"steps": 8, **changes}), out)[0]
        assert isinstance(summary, dict), summary
        return losses(out)

    return run


def test_quantized_runs_learn_as_plain_ones_do(losses_with):
    plain = losses_with()
    for changes, rel in (
        ({"quantize": "fp8", "reduce": "int8"}, 5e-3),
        ({"quantize": "int8", "reduce": "bf16"}, 5e-3),
    ):
        quantized = losses_with(**changes)
        assert quantized != plain, changes
        assert quantized == pytest.approx(plain, rel=rel), changes


def test_a_resumed_run_with_stochastic_reductions_has_the_same_losses(folder, tmp_path):
    config = tiny(folder, steps=6, save_every=3, reduce="int8")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_ranks(2, train, config, whole)
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "step-00000006")
    (parts / "checkpoints" / "latest").unlink()
    (parts / METRICS).unlink()
    (summary, _) = run_ranks(2, train, with_changes(config, resume=True), parts)
    assert summary["first_step"] == 3
    assert losses(parts) == {step: loss for step, loss in losses(whole).items() if step >= 3}
    saved = [read_model(out / "checkpoints" / "step-00000006") for out in (whole, parts)]
    assert all(value.equal(saved[1][name]) for name, value in saved[0].items())


def test_a_plan_says_what_a_gather_and_a_reduction_send(folder):
    plain = make_plan(tiny(folder), 256, 2).units[1]
    coded = make_plan(tiny(folder, quantize="fp8", reduce="int8"), 256, 2).units[1]
    assert plain.codes == 0
    assert plain.sent == plain.reduced == 4 * sum(plain.shards)
    norms = 4 * coded.shards[0]
    assert coded.sent - norms == coded.codes
    assert coded.codes < 0.26 * plain.sent
    assert coded.reduced - norms < 0.30 * plain.reduced  # rows of 32 and 64 elements have a scale each
