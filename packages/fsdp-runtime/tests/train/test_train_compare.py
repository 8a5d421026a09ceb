"""`fsdp-train compare`: several ways to train the same, interleaved, with a table and a check of the losses."""

import dataclasses

import pytest
from train_helpers import tiny

from fsdp_runtime.train import compare
from fsdp_runtime.train.compare import GATHERS, Way, compare_losses, table
from fsdp_runtime.train.errors import TrainError

pytestmark = pytest.mark.long


@pytest.fixture
def config(folder, tmp_path):
    return tiny(folder, steps=12, out=str(tmp_path / "out"))


@pytest.fixture
def seen(monkeypatch):
    """Configurations of runs, in place of which a stand-in records them; the loss of every step is 1."""
    seen = []

    def run(config, ranks):
        config.check(ranks)
        seen.append(config)
        step = {"kind": "train", "tokens_per_s": 1.0, "cpu_s": 1.0, "memory_mb": 1.0, "loss": 1.0}
        steps = [{**step, "step": number} for number in range(config.steps)]
        return [*steps, {"kind": "held_out", "step": config.steps, "loss": 1.0}]

    monkeypatch.setattr(compare, "run_quietly", run)
    return seen


def test_ways_take_turns_in_a_rotating_order(config, seen, capsys):
    assert compare.compare(config, f"gathers={','.join(GATHERS)}", 2, 2) == 0
    order = [(one.precision, one.quantize, one.reduce) for one in seen]
    assert order == order[::-1]
    assert len(set(order)) == len(GATHERS)
    assert "| fp8-int8 | 1 |" in capsys.readouterr().out


def test_a_system_that_is_not_installed_is_reported_and_the_others_are_compared(
    config, seen, capsys, monkeypatch
):
    monkeypatch.setattr(compare, "not_installed", {"deepspeed": "not installed"}.get)
    assert compare.compare(config, "system=fsdp_runtime,ddp,deepspeed", 1, 2) == 0
    said = capsys.readouterr()
    assert "deepspeed: not installed" in said.err
    assert "losses of ddp and fsdp_runtime: 0.0e+00 apart at most, agree" in said.out


def test_a_way_that_cannot_be_trained_is_refused_before_the_first_one_is(config, seen, monkeypatch):
    monkeypatch.setattr(compare, "not_installed", {}.get)
    changed = dataclasses.replace(config, save_every=5)
    with pytest.raises(TrainError, match="saves no checkpoints"):
        compare.compare(changed, "system=fsdp_runtime,deepspeed", 1, 2)
    assert seen == []


def test_options_that_one_system_has_are_left_out_of_the_others(config, seen):
    changed = dataclasses.replace(config, hsdp=2, reduce="bf16")
    assert compare.compare(changed, "system=fsdp_runtime,ddp", 1, 2) == 0
    assert [(one.hsdp, one.reduce) for one in seen] == [(2, "bf16"), (1, "none")]


def test_two_systems_are_trained_and_compared(config, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    drawn = dataclasses.replace(config, plot=True)
    assert compare.compare(drawn, "system=fsdp_runtime,ddp", 1, 2) == 0
    folder = compare.Path(config.out)
    assert "losses of ddp and fsdp_runtime: " in (folder / "table.md").read_text()
    assert (folder / "curves.png").stat().st_size > 1000


@pytest.mark.parametrize(("loss", "status"), [(1.001, 1), (1.00001, 0)])
def test_losses_of_systems_that_differ_fail_a_comparison(config, loss, status):
    def way(name, loss):
        return Way(name, {}, 2, [[{"kind": "train", "step": 0, "loss": loss}]])

    found, lines = compare_losses(config, [way("ddp", 1.0), way("fsdp2", loss)])
    assert found == status
    assert ("DO NOT AGREE" in lines[0]) == bool(status)


def test_the_table_has_ratios_to_the_first_system():
    rows = {
        "ours": {"tokens_per_s": 200.0, "seconds": 0.1, "memory_mb": 50.0, "loss": 1.0},
        "theirs": {"tokens_per_s": 100.0, "seconds": 0.2, "memory_mb": 100.0, "loss": 1.0},
    }
    assert table(rows, "system", "s/step")[-1] == "| theirs | 100 | 0.50 | 0.200 | 100 | 2.00 | 1.00000 |"
