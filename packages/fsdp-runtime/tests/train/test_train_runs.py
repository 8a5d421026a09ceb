"""Runs on real ranks: the same curve at any world size, whatever interrupts them."""

import importlib.metadata
import json
import re
import shutil
import signal
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from host_waits import host_waits
from train_helpers import apart, losses, newest, read_model, tiny, train, train_and_stop, with_changes

from fsdp_runtime.train import PRESETS, Trainer, TrainError, Transformer, systems
from fsdp_runtime.train.checkpoint import latest
from fsdp_runtime.train.errors import check_agreement
from fsdp_runtime.train.hardware import own_device
from fsdp_runtime.train.launch import check_options
from fsdp_runtime.train.model import losses_of
from fsdp_runtime.train.report import METRICS, closing_lines, read_metrics
from ragged_shard.dist import gather_from_ranks
from ragged_shard.testing import SimulatedDevice, on_ranks, run_ranks, shut_down

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


def test_the_newest_checkpoints_are_kept(folder, tmp_path):
    summaries = run_ranks(2, train, tiny(folder, steps=5, save_every=2, keep=2), tmp_path)
    assert [summary["steps"] for summary in summaries] == [5, 5]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000005"]


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
        ({"model": PRESETS["tiny-moe"]}, "was made with ff_dim 88, this run has 40"),
        ({"batch": 6}, "was made with batch 12, this run has 6"),
        ({"seed": 5}, "was made with seed 0, this run has 5"),
        ({"optimizer": "adamw"}, "was made with optimizer torch-adamw, this run has adamw"),
        ({"data": (str(folder / "text" / "1*.py"),)}, "was made with data [0-9a-f]+, this run has"),
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
            r"step [23]: the loss is .* and the gradients' norm nan; try a lower --lr",
        ),
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


def test_a_nan_on_one_rank_ends_all_and_its_update_is_not_saved(folder, tmp_path):
    messages = run_ranks(2, _nan_on_rank_1, tiny(folder, steps=8, save_every=2), tmp_path, 4)
    assert len(set(messages)) == 1
    assert messages[0].startswith("step 4: the loss is nan and ")
    assert latest(tmp_path).name == "step-00000002"


def test_a_checkpoint_is_what_plain_torch_loads(saved):
    model = Transformer(PRESETS["tiny"])
    model.load_state_dict(read_model(newest(saved)))
    assert model.get_parameter("blocks.1.ff.w_up.weight").std() > 0.01


def test_without_checkpoints_and_a_plot_only_metrics_are_written(folder, tmp_path):
    Trainer(tiny(folder, system="one", steps=2), tmp_path, quiet=True).run()
    assert [path.name for path in tmp_path.iterdir()] == [METRICS]


def test_a_stopped_run_without_checkpoints_does_not_say_that_it_is_saved(folder, tmp_path):
    asked = iter([0, *[1] * 9])
    config = tiny(folder, system="one", steps=9)
    summary = Trainer(config, tmp_path, quiet=True, stop=lambda: next(asked)).run()
    expected = f"stopped after step {summary['steps']}, which --save-every 0 does not save"
    assert closing_lines(summary) == expected


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|not available)")
def test_training_waits_nowhere_and_reads_figures_after_their_copy(folder, tmp_path):
    with SimulatedDevice():
        trainer = Trainer(tiny(folder, system="one", steps=4), tmp_path, quiet=True)
        with host_waits([*trainer.model.parameters(), *trainer.model.buffers()]) as waits:
            trainer.run()
    assert waits.lines == []
    assert [entry["step"] for entry in read_metrics(tmp_path / METRICS)] == [0, 1, 2, 3]


def test_quantized_runs_learn_as_plain_ones_do(folder, tmp_path):
    plain = tiny(folder)
    quantized = [{"quantize": "fp8", "reduce": "int8"}, {"quantize": "int8", "reduce": "bf16"}]
    for number, changes in enumerate([{}, *quantized]):
        run_ranks(2, train, with_changes(plain, **changes), tmp_path / str(number))
        found, expected = losses(tmp_path / str(number)), losses(tmp_path / "0")
        assert found == pytest.approx(expected, rel=5e-3), changes
        assert (found != expected) == bool(changes)


def test_a_resumed_run_with_stochastic_reductions_has_the_same_losses(folder, tmp_path):
    config = tiny(folder, steps=6, save_every=3, reduce="int8")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_ranks(2, train, config, whole)
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "step-00000006")
    (parts / METRICS).unlink()
    (summary, _) = run_ranks(2, train, with_changes(config, resume=True), parts)
    assert summary["first_step"] == 3
    assert losses(parts) == {step: loss for step, loss in losses(whole).items() if step >= 3}
    saved = [read_model(out / "checkpoints" / "step-00000006") for out in (whole, parts)]
    assert all(value.equal(saved[1][name]) for name, value in saved[0].items())


@on_ranks(3)
def test_options_and_versions_that_differ_are_named_with_their_ranks(tmp_path):
    config = tiny(tmp_path)
    odd = dist.get_rank() == 1
    check_options(config)
    check_options(with_changes(config, out=str(odd), data=(str(odd),)))
    cases: list[tuple[Any, Any, str]] = [
        (check_options, with_changes(config, batch=12 + 6 * odd), "--batch: 12 on ranks 0, 2; 18 on rank 1"),
        (check_options, with_changes(config, resume=odd), "--resume: False on ranks 0, 2; True on rank 1"),
        (check_agreement, {"triton": "3.7"} if odd else {}, "triton: absent on ranks 0, 2; 3.7 on rank 1"),
    ]  # fmt: skip
    for check, value, message in cases:
        with pytest.raises(TrainError) as error:
            check(value)
        assert str(error.value) == f"ranks do not agree on {message}"
    installed = importlib.metadata.version
    for package in ("torch", "layout-planner", "ragged-shard", "dbuffer", "block-optim", "fsdp-runtime"):
        changed = {package: "9"} if odd else {}
        with (
            mock.patch(
                "importlib.metadata.version", lambda name, by=changed: by.get(name) or installed(name)
            ),
            pytest.raises(TrainError, match=rf"the version of {package}: .*; 9 on rank 1"),
        ):
            check_options(config)


@on_ranks(2)
def test_data_that_differs_is_named_before_the_first_step(folder, tmp_path):
    config = tiny(folder)
    if dist.get_rank() == 1:
        config = with_changes(config, data=(str(folder / "text" / "1*.py"),))
    message = train(config, tmp_path)
    assert message.startswith("ranks do not agree on --data (a digest of names and sizes): ")
    assert gather_from_ranks(message) == [message] * 2


@pytest.mark.parametrize(("count", "local_rank", "index"), [(8, 3, 3), (1, 0, 0), (1, 7, 0)])
def test_a_rank_takes_its_own_device_or_the_only_one(monkeypatch, count, local_rank, index):
    chosen: list[int] = []
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    assert own_device("cuda", local_rank) == torch.device("cuda", index)
    assert chosen == [index]


def events_of(path):
    return {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}


def test_a_profile_has_its_steps_and_the_units_labels_on_each_rank(folder, tmp_path):
    run_ranks(2, train, tiny(folder, steps=3, profile="1:2"), tmp_path)
    assert len(list(tmp_path.glob("trace-*"))) == 2
    for rank in range(2):
        found = events_of(tmp_path / f"trace-rank-{rank}.json")
        assert {name for name in found if "ProfilerStep" in name} == {"ProfilerStep#1"}
        assert {"FSDP::all_gather (blocks.0)", "FSDP::post_backward_reduce (blocks.0)"} <= found


def test_a_profile_may_begin_with_the_first_step_and_be_cut_off_by_the_end(folder, tmp_path):
    asked = iter([0, *[1] * 9])
    config = tiny(folder, system="one", steps=9, profile="0:9")
    assert Trainer(config, tmp_path, quiet=True, stop=lambda: next(asked)).run()["stopped"]
    assert {"ProfilerStep#0", "ProfilerStep#1"} <= events_of(tmp_path / "trace-rank-0.json")
