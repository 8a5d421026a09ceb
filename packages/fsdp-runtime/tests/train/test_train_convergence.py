"""The comparison of quantized gathers and reductions over seeds."""

import pytest
from train_helpers import text_folder, tiny

from fsdp_runtime.train import TrainError
from fsdp_runtime.train.cli import main
from fsdp_runtime.train.convergence import KINDS, check_convergence


@pytest.fixture
def config(tmp_path):
    text_folder(tmp_path)
    return tiny(tmp_path, steps=12, precision="bf16", out=str(tmp_path / "out"))


def runner(offsets):
    """A stand-in for a run: seeds are 0.1 apart, and each kind has an offset."""
    seen = []

    def run(config, ranks):
        config.check(ranks)
        kind = {("none", "none"): "bf16", ("fp8", "none"): "fp8"}.get((config.quantize, config.reduce))
        kind = kind or f"fp8-{config.reduce}"
        seen.append((kind, config.seed, config.precision, config.eval_every))
        loss = 2 + 0.1 * config.seed + offsets.get(kind, 0.0)
        steps = [{"kind": "train", "step": step, "loss": loss} for step in range(config.steps)]
        return [*steps, {"kind": "held_out", "step": config.steps, "loss": loss}]

    return run, seen


def test_every_kind_runs_at_every_seed_with_the_same_precision(config, capsys):
    run, seen = runner({})
    assert check_convergence(config, [3, 5], 2, run) == 0
    assert seen == [(kind, seed, "bf16", config.steps) for seed in (3, 5) for kind in KINDS]
    table = capsys.readouterr().out
    assert "| fp8 gathers, int8 reductions | 2.3000 | 2.5000 | 2.4000 | 0.0000 |" in table


def test_a_kind_further_from_bf16_than_its_seeds_are_apart_fails(config, capsys):
    assert check_convergence(config, [0, 1], 2, runner({"fp8": -0.09})[0]) == 0
    assert check_convergence(config, [0, 1], 2, runner({"fp8-int8": 0.11, "fp8": -0.09})[0]) == 1
    assert "further from bf16 than that: fp8-int8" in capsys.readouterr().out


def test_a_loss_that_is_not_a_number_fails(config):
    assert check_convergence(config, [0, 1], 2, runner({"fp8-bf16": float("nan")})[0]) == 1


@pytest.mark.parametrize("seeds", [[0], [1, 1]])
def test_one_seed_says_nothing_of_a_spread(config, seeds):
    with pytest.raises(TrainError, match="expected two different ones or more"):
        check_convergence(config, seeds, 2, runner({})[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--seed", "1"], "takes --seeds"), (["--seeds", "a,b"], "expected numbers with commas")],
)
def test_wrong_seeds_are_one_line(arguments, message, capsys):
    assert main(["convergence", *arguments]) == 2
    assert message in capsys.readouterr().err
