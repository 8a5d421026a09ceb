"""Plans and measured bytes of runs."""

import gc
from pathlib import Path

import pytest
import torch
from train_helpers import tiny

from fsdp_runtime.memory import gathered_memory
from fsdp_runtime.train import PRESETS, Trainer
from fsdp_runtime.train.plan import LiveBytes, make_plan
from ragged_shard.testing import run_ranks

STEPS = 3


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

    class Measured(Trainer):
        def _train_step(self):
            if self.step == STEPS - 1:
                met["resident"] = bytes_of_all_tensors() - others
                met["rest"] = met["resident"] + pool()
                live.__enter__()
            return super()._train_step()

    live = LiveBytes(pool)
    Path(out).mkdir(parents=True, exist_ok=True)
    trainer = Measured(config, Path(out), quiet=True)
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
def test_a_step_takes_the_bytes_of_its_plan(folder, tmp_path, world_size, changes):
    config = tiny(folder, steps=STEPS, **changes)
    plan = make_plan(config, 256, world_size)
    rest, peak = run_ranks(world_size, measure, config, tmp_path)[0]
    assert rest == pytest.approx(plan.at_rest, rel=0.01)
    assert 0.8 * plan.peak <= peak <= 1.05 * plan.peak


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
