"""What a plan says is what a run holds."""

import dataclasses
from typing import Any

import pytest
import torch
from train_helpers import tiny, train

from fsdp_runtime.memory import LiveBytes, UnitMemory, fake_tensors
from fsdp_runtime.memory.meter import bytes_of_all_tensors
from fsdp_runtime.train import PRESETS
from fsdp_runtime.train.plan.command import plan_lines
from fsdp_runtime.train.plan.memory import make_plan
from fsdp_runtime.train.plan.peaks import record, step_peaks, without_activations
from ragged_shard import CPU
from ragged_shard.testing import run_ranks


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (2, {"model": PRESETS["small"], "seq_len": 64, "batch": 4}),
        *(
            pytest.param(ranks, {"model": PRESETS["small"], "batch": 4, **changes}, marks=pytest.mark.long)
            for ranks, changes in (
                (3, {"seq_len": 64, "batch": 3, "model": PRESETS["small-moe"]}),
                (2, {"seq_len": 64, "optimizer": "muon"}),
                (2, {"seq_len": 64, "precision": "bf16", "accumulate": 2}),
                (2, {"seq_len": 128, "checkpointing": True}),
                (2, {"seq_len": 64, "quantize": "fp8", "reduce": "int8"}),
            )
        ),
    ],
)
def test_the_measured_live_bytes_are_at_most_a_few_percent_from_the_plan(
    folder, tmp_path, world_size, changes
):
    config = tiny(folder, steps=6, measure=True, **changes)
    plan = make_plan(config, 256, world_size)
    measured = run_ranks(world_size, train, config, tmp_path)[0]["measured_peak"]
    assert 0.88 * plan.peak <= measured <= 1.05 * plan.peak  # less where reductions end sooner


def test_a_plan_knows_shards_of_ranks_that_do_not_exist(folder):
    config = tiny(folder, model=PRESETS["small"], batch=1024)
    units, whole = (make_plan(config, 256, ranks).units for ranks in (1024, 1))
    for unit, alone in zip(units, whole, strict=True):
        assert unit.parameters == alone.parameters == 1024 * sum(unit.shards) - unit.padding
        assert unit.weights == 4 * sum(unit.shards)


def test_a_plan_has_a_line_for_all_units_of_a_size(folder):
    config = tiny(folder, block="rows:8")
    lines = plan_lines(make_plan(config, 256, 3), config.splits(3))
    assert [line.split("|")[1].strip() for line in lines[4:6]] == [
        "Transformer",
        "blocks.0 to blocks.1 (2, each)",
    ]
    assert lines[-1].startswith("peak")


def three_layers(**changes):
    """The units of a root with three layers, and the moments of a step without activations."""
    fields: dict[str, Any] = dict.fromkeys([field.name for field in dataclasses.fields(UnitMemory)], 0)
    empty = UnitMemory(**{**fields, "decoding": (), "kept_after_forward": False})
    unit = dataclasses.replace(empty, gathered=(100,), reducing=(100,), gradients=50, **changes)
    root = dataclasses.replace(empty, gathered=(10,), reducing=(10,), gradients=5, kept_after_forward=True)
    return [root, unit, unit, unit], without_activations(3)


@pytest.mark.parametrize("made", [lambda x: x, lambda x: (x, None)])
def test_units_may_return_a_tensor_or_a_tuple_that_begins_with_one(made):
    class Layer(torch.nn.Linear):
        def forward(self, x):
            return made(super().forward(x[0] if isinstance(x, tuple) else x))

    def run(model, tokens, targets):
        out = model(torch.ones(2, 4, requires_grad=True))
        return (out[0] if isinstance(out, tuple) else out).sum()

    def build():
        return torch.nn.Sequential(Layer(4, 4), Layer(4, 4))

    moments = record(
        build, lambda model: list(model.children()), run, torch.float32, rows=2, seq_len=4, device=CPU
    )
    assert {moment.unit for moment in moments if moment.what == "backward"} == {0, 1, 2}


def test_a_step_has_two_units_gathered_two_reducing_and_those_that_stay():
    units, moments = three_layers()
    peak, buffers = step_peaks(units, moments)
    assert buffers == 10 + 10 + 4 * 100
    assert peak == 10 + 10 + 4 * 100 + 2 * 50  # in the last layer's backward
    with_scratch, _ = three_layers(scratch=1000)
    assert step_peaks(with_scratch, moments)[0] > peak
    wide = [units[0], *(dataclasses.replace(unit, gathered=(1000,)) for unit in units[1:])]
    assert step_peaks(wide, moments)[1] == 10 + 10 + 2 * 1000 + 2 * 100
    kept = wide[:2] + [dataclasses.replace(unit, kept_after_forward=True) for unit in wide[2:]]
    assert step_peaks(kept, moments)[1] == 10 + 10 + 3 * 1000 + 100  # all three layers, and one reducing


def test_live_bytes_count_storages_once_until_they_are_freed():
    given = torch.zeros(100)
    with LiveBytes() as live:
        a = given + 1
        b = a.view(10, 10).t()
        given.add_(1)
        assert live.now == 400
        c = a * 2
        del c
        assert live.now == 400
        del a, b
        assert live.now == 0
    assert live.peak == 800


def test_fake_tensors_that_are_still_there_have_no_bytes():
    before = bytes_of_all_tensors()
    with fake_tensors():
        kept = torch.empty(1 << 20)
    assert bytes_of_all_tensors() == before
    assert kept.numel()
