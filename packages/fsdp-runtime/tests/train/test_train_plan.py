"""What a plan says is what a run holds."""

import gc
from pathlib import Path

import pytest
import torch
from train_helpers import tiny

from fsdp_runtime.memory import gathered_memory
from fsdp_runtime.train import PRESETS, Trainer
from fsdp_runtime.train.live_bytes import LiveBytes
from fsdp_runtime.train.plan import make_plan, plan_lines
from ragged_shard.testing import run_ranks

STEPS = 6


def bytes_of_all_tensors():
    """Bytes of the storages of all tensors that Python knows in this process, each once."""
    gc.collect()  # what an earlier run in this process left in cycles is not this one's
    sizes = {}
    for item in gc.get_objects():
        kind = type(item)
        if issubclass(kind, torch.Tensor) and not hasattr(kind, "to_local") and item.layout == torch.strided:
            storage = item.untyped_storage()
            if storage.device.type != "meta":
                sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def measure(config, out):
    """Live bytes of this rank before the last step, and the most in it.

    Storages that are there, that operations make until they are freed, and gathered buffers; not what gloo allocates.
    """
    others, met = bytes_of_all_tensors(), {}

    def pool():
        stats = gathered_memory(trainer.model)
        return stats.lent_bytes + stats.parked_bytes

    def beat(doing):
        if doing == f"step {STEPS}":
            met["resident"] = bytes_of_all_tensors() - others
            met["rest"] = met["resident"] + pool()
            live.__enter__()

    live = LiveBytes(pool)
    Path(out).mkdir(parents=True, exist_ok=True)
    trainer = Trainer(config, Path(out), quiet=True, beat=beat)
    trainer.run()
    live.__exit__(None, None, None)
    return met["rest"], met["resident"] + live.peak


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
                (4, {"seq_len": 64, "hsdp": 2, "reshard": False}),
            )
        ),
    ],
)
def test_the_measured_live_bytes_are_at_most_a_few_percent_from_the_plan(
    folder, tmp_path, world_size, changes
):
    config = tiny(folder, steps=STEPS, **changes)
    plan = make_plan(config, 256, world_size)
    rest, peak = run_ranks(world_size, measure, config, tmp_path)[0]
    assert rest == pytest.approx(plan.at_rest, rel=0.01)
    assert 0.88 * plan.peak <= peak <= 1.05 * plan.peak  # less where reductions end sooner


@pytest.mark.long
def test_a_transformers_models_plan_is_what_a_run_holds(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    ).save_pretrained(tmp_path)  # fmt: skip
    config = tiny(folder, hf_config=str(tmp_path / "config.json"), seq_len=64, batch=8, steps=STEPS)
    plan = make_plan(config, 1, 2)
    rest, peak = run_ranks(2, measure, config, tmp_path / "run")[0]
    assert rest == pytest.approx(plan.at_rest, rel=0.001)
    assert 0.85 * plan.peak <= peak <= 1.03 * plan.peak


def test_a_plan_knows_shards_of_ranks_that_do_not_exist(folder):
    config = tiny(folder, model=PRESETS["small"], batch=1024)
    units, whole = (make_plan(config, 256, ranks).units for ranks in (1024, 1))
    for unit, alone in zip(units, whole, strict=True):
        assert unit.parameters == alone.parameters == 1024 * sum(unit.shards) - unit.padding
        assert unit.weights == 4 * sum(unit.shards)


def test_a_plan_has_a_line_for_all_units_of_a_size(folder):
    config = tiny(folder, block="rows:8")
    lines = plan_lines(make_plan(config, 256, 3), 3)
    assert [line.split("|")[1].strip() for line in lines[4:6]] == [
        "Transformer",
        "blocks.0 to blocks.1 (2, each)",
    ]
    assert lines[-1].startswith("peak")


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
