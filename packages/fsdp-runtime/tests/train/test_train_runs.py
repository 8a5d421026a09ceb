"""Runs on real ranks: the same curve at any world size, whatever interrupts them."""

import errno
import json
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from train_helpers import (
    apart,
    losses,
    newest,
    read_model,
    tiny,
    train,
    train_and_die,
    train_and_stop,
    with_changes,
)

from fsdp_runtime.train import PRESETS, Trainer, Transformer, checkpoint, systems
from fsdp_runtime.train.checkpoint import latest
from fsdp_runtime.train.model import losses_of
from fsdp_runtime.train.report import METRICS, Report, read_metrics
from ragged_shard.testing import RankError, SimulatedDevice, host_waits, run_ranks, shut_down

# Sums are rounded differently on other numbers of ranks and other CPUs. A router then sends a token to another expert,
# which moves later losses in the fourth digit; a wrong gradient moves the first.
SAME = 1e-3


@pytest.fixture(scope="module")
def curve(folder):
    """The curve of 20 steps in one process, without sharding."""
    run_ranks(1, train, tiny(folder, model=PRESETS["tiny-moe"], steps=20, system="one"), folder / "one")
    return losses(folder / "one")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_curves_at_any_world_size_lie_on_each_other(folder, curve, world_size):
    config = tiny(folder, model=PRESETS["tiny-moe"], steps=20)
    run_ranks(world_size, train, config, folder / f"w{world_size}")
    assert apart(losses(folder / f"w{world_size}"), curve) < SAME
    assert len(curve) == 20
    assert curve[19] < curve[0] - 1.0


@pytest.mark.long
def test_every_system_block_microbatch_and_number_of_copies_gives_the_same_curve(folder, curve):
    config = tiny(folder, model=PRESETS["tiny-moe"], steps=20)
    runs: dict[str, dict] = {
        "fsdp2": {"system": "fsdp2"},
        "ddp": {"system": "ddp"},
        "accumulated": {"accumulate": 3},
        "kept": {"reshard": False, "checkpointing": True},
        "tiles": {"block": "tile:8x8"},
        "whole": {"block": "whole"},  # norm weights stay as they are
        "copies": {"hsdp": 2, "accumulate": 3},
        "bf16": {"precision": "bf16"},
    }
    for name, changes in runs.items():
        run_ranks(4 if name == "copies" else 2, train, with_changes(config, **changes), folder / name)
        assert apart(losses(folder / name), curve) < (0.02 if name == "bf16" else SAME), name
    assert apart(losses(folder / "bf16"), curve) > 0


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw8bit", "adamw", "muon", "shampoo", "soap"])
def test_a_run_resumed_at_another_world_size_goes_on_with_the_same_losses(folder, optimizer):
    config = tiny(folder, steps=8, optimizer=optimizer, save_every=3)
    whole, part = folder / f"whole-{optimizer}", folder / f"part-{optimizer}"
    run_ranks(2, train, config, whole)
    summaries = run_ranks(2, train_and_stop, config, part, 4, 1)
    assert [summary["stopped"] for summary in summaries] == [True, True]
    assert latest(part).name == f"step-{summaries[0]['steps']:08d}"
    resumed = run_ranks(4, train, with_changes(config, resume=True, hsdp=2), part)
    assert resumed[0]["first_step"] == summaries[0]["steps"]
    assert apart(losses(part), losses(whole)) < 1e-5


@pytest.fixture(scope="module")
def saved(folder):
    """A run of four steps on two ranks, saved after two and four; tests work on copies."""
    run_ranks(2, train, tiny(folder, steps=4, save_every=2), folder / "saved")
    return folder / "saved"


@pytest.mark.long
def test_a_killed_run_loses_only_the_steps_since_its_last_checkpoint(folder, tmp_path):
    config = tiny(folder, steps=12, save_every=4, eval_every=6)
    run_ranks(1, train, config, folder / "unkilled")
    with pytest.raises(RankError, match=r"SIGKILL|signal 9|died"):
        run_ranks(2, train_and_die, config, tmp_path, 10)
    assert latest(tmp_path).name in ("step-00000004", "step-00000008")
    (resumed,) = run_ranks(1, train, with_changes(config, resume=True), tmp_path)
    assert resumed["first_step"] in (4, 8)
    assert apart(losses(tmp_path), losses(folder / "unkilled")) < 1e-5
    assert not list((tmp_path / "checkpoints").glob("*.part"))


def test_the_newest_checkpoints_are_kept_and_written_after_their_folder(folder, tmp_path):
    summaries = run_ranks(2, _slow_to_make_it, tiny(folder, steps=5, save_every=2, keep=2), tmp_path)
    assert [summary["steps"] for summary in summaries] == [5, 5]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step-00000004", "step-00000005"]


@pytest.mark.long
def test_a_full_disk_keeps_the_old_checkpoint_and_every_rank_names_the_path(folder, saved, tmp_path):
    out, config = shutil.copytree(saved, tmp_path / "run"), tiny(folder, steps=6, save_every=2, resume=True)
    shut_down()  # new ranks: the file of their store grows with what they ran, and is limited too
    messages = run_ranks(2, _train_on_a_full_disk, config, out)
    assert len(set(messages)) == 1
    assert "cannot save" in messages[0]
    assert "step-00000006" in messages[0]
    assert "step-00000004 stays" in messages[0]
    assert latest(out).name == "step-00000004"
    (summary,) = run_ranks(1, train, config, out)
    assert summary["first_step"] == 4


def _train_on_a_full_disk(config, out):
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # metrics fit, checkpoints do not
    try:
        return train(config, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_folder_that_cannot_be_made_ends_every_rank_with_one_message(folder, tmp_path):
    messages = run_ranks(2, _without_a_folder, tiny(folder, steps=4, save_every=2), tmp_path)
    assert len(set(messages)) == 1
    assert re.search("cannot save .*step-00000002: .*No space left", messages[0])


def _without_a_folder(config, out):
    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch.object(checkpoint, "write_synced", full):
        return train(config, out)


def _slow_to_make_it(config, out):
    """Rank 0, which makes folders, is late: the other must not have made them."""
    made = Path.mkdir

    def late(path, *arguments, **options):
        if dist.get_rank() == 0 and path.name.endswith(".part"):
            time.sleep(0.3)
        made(path, *arguments, **options)

    with mock.patch.object(Path, "mkdir", late):
        return train(config, out)


def _train_each(configs, out):
    return [train(config, out) for config in configs]


def assert_refused(configs, messages, out):
    """Each run ends with the same line on two ranks, one that matches the message."""
    lines_of_runs = zip(*run_ranks(2, _train_each, configs, out), strict=True)
    for message, lines in zip(messages, lines_of_runs, strict=True):
        assert len(set(lines)) == 1, message
        assert re.search(message, str(lines[0]))
        assert "\n" not in lines[0]


def test_a_checkpoint_that_does_not_fit_is_refused_on_every_rank(folder, saved):
    refused: list[tuple[dict, str]] = [
        ({"model": PRESETS["tiny-moe"]}, "is a checkpoint of another model: .* is absent there"),
        ({"batch": 6}, "was made with batch 12, this run has 6"),
        ({"seed": 5}, "was made with seed 0, this run has 5"),
        ({"optimizer": "adamw"}, "was made with optimizer torch-adamw, this run has adamw"),
        (
            {"model": replace(PRESETS["tiny"], num_heads=2, num_kv_heads=1)},
            "was made with num_heads 4, this run has 2",
        ),
        ({"steps": 2}, "is beyond --steps 2"),
    ]
    config = tiny(folder, steps=4, save_every=2, resume=True)
    assert_refused(
        [with_changes(config, **changes) for changes, _ in refused], [m for _, m in refused], saved
    )


def test_bad_input_is_the_same_line_on_every_rank(folder, tmp_path):
    bad: list[tuple[dict, str]] = [
        ({"data": ("/nothing/here",)}, "no data: '/nothing/here' matches no file"),
        ({"dtype": "float99"}, "--dtype 'float99': expected one of uint8"),
        (
            {"lr": 1e9, "clip": 0.0, "optimizer": "torch-sgd", "steps": 30},
            r"step [23]: the (gradients' norm is nan \(the loss |loss of 2 ranks is nan)",  # differs between CPUs
        ),
        ({"hf_config": "/nothing.json"}, "--hf-config /nothing.json: no such file"),
    ]
    assert_refused([tiny(folder, **changes) for changes, _ in bad], [m for _, m in bad], tmp_path)


def _nan_on_rank_1(config, out, step):
    calls: list = []

    def bad(model, tokens, targets):
        calls.append(None)
        cross_entropy, aux = losses_of(model, tokens, targets)
        here = dist.get_rank() == 1 and len(calls) == step
        return cross_entropy * (float("nan") if here else 1.0), aux

    with mock.patch.object(systems, "losses_of", bad):
        return train(config, out)


def test_a_nan_on_one_rank_is_named_and_what_it_spoilt_is_not_saved(folder, tmp_path):
    messages = run_ranks(2, _nan_on_rank_1, tiny(folder, steps=8, save_every=2), tmp_path, 4)
    assert len(set(messages)) == 1
    assert messages[0].startswith("step 4: the loss of rank 1 is nan; ")
    assert latest(tmp_path).name == "step-00000002"


def test_a_checkpoint_is_what_plain_torch_loads(saved):
    model = Transformer(PRESETS["tiny"])
    model.load_state_dict(read_model(newest(saved)))
    assert model.get_parameter("blocks.1.ff.w_up.weight").std() > 0.01


def test_a_transformers_model_trains_and_exports_under_its_own_names(folder, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    settings = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(settings))
    config = tiny(folder, steps=6, save_every=6, hf_config=str(path))
    run_ranks(1, train, with_changes(config, system="one"), tmp_path / "one")
    run_ranks(2, train, with_changes(config, checkpointing=True), tmp_path / "two")
    assert apart(losses(tmp_path / "two"), losses(tmp_path / "one")) < 1e-5
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    model.load_state_dict(read_model(newest(tmp_path / "two"), torch.bfloat16))


def test_a_metrics_file_that_cannot_be_written_is_the_problem_of_the_report(tmp_path):
    full = mock.Mock(**{"write.side_effect": OSError(errno.ENOSPC, "No space left on device")})
    with Report(tmp_path, 0, 4, quiet=True) as report, mock.patch.object(report, "_file", full):
        report.step({"step": 0, "loss": 1.0})
    assert "No space left on device" in str(report.problem)


def test_without_checkpoints_and_a_plot_only_metrics_are_written(folder, tmp_path):
    Trainer(tiny(folder, system="one", steps=2), tmp_path, quiet=True).run()
    assert [path.name for path in tmp_path.iterdir()] == [METRICS]


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|not available)")
def test_training_waits_nowhere_and_reads_figures_after_their_copy(folder, tmp_path):
    with SimulatedDevice():
        trainer = Trainer(tiny(folder, system="one", steps=4, log_every=1), tmp_path, quiet=True)
        with host_waits([*trainer.model.parameters(), *trainer.model.buffers()]) as waits:
            trainer.run()
    assert waits.lines == []
    assert [entry["step"] for entry in read_metrics(tmp_path / METRICS)] == [0, 1, 2, 3]
