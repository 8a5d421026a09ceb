"""Runs whose weights and gradients travel quantized."""

import shutil

import pytest
from train_helpers import losses, read_model, tiny, train, with_changes

from fsdp_runtime.train import ModelConfig
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
        ({"quantize": "mxfp8"}, 5e-3),
        ({"quantize": "nvfp4"}, 2e-2),
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


SIZES = {"model": ModelConfig(dim=128, num_layers=1, num_heads=2, ff_dim=256)}
READ_BACK, SCALED = {"quantize": "fp8"}, {"quantize": "fp8", "compute": "scaled"}


@pytest.mark.long
def test_products_of_codes_learn_as_plain_ones_do(losses_with):
    plain, products = losses_with(**SIZES, **READ_BACK), losses_with(**SIZES, **SCALED)
    assert products != plain
    assert products == pytest.approx(plain, rel=5e-3)
    by_phase = losses_with(**SIZES, quantize="mxfp8", compute="scaled")
    assert by_phase == pytest.approx(plain, rel=5e-3)


def test_a_plan_knows_the_memory_of_products_of_codes(folder):
    values, codes = (make_plan(tiny(folder, **SIZES, **how), 256, 2) for how in (READ_BACK, SCALED))
    matrices = 2 * sum(codes.units[1].shards[1:])
    tiles = matrices / 128**2
    assert sum(values.units[1].gathered) - sum(codes.units[1].gathered) == 3 * matrices - 4 * tiles
    assert codes.units[1].sent == values.units[1].sent


def test_a_plan_says_what_a_gather_and_a_reduction_send(folder):
    plain = make_plan(tiny(folder), 256, 2).units[1]
    coded = make_plan(tiny(folder, quantize="fp8", reduce="int8"), 256, 2).units[1]
    assert plain.codes == 0
    assert plain.sent == plain.reduced == 4 * sum(plain.shards)
    norms = 4 * coded.shards[0]
    assert coded.sent - norms == coded.codes
    assert coded.codes < 0.26 * plain.sent
    assert coded.reduced - norms < 0.30 * plain.reduced  # rows of 32 and 64 elements have a scale each
