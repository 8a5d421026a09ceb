"""`--offload` on the simulated device: the losses of a run without it, also after it was resumed."""

from itertools import count
from unittest import mock

import pytest
from train_helpers import losses, text_folder, tiny, train

from fsdp_runtime._schedule import activations
from fsdp_runtime.train import TrainError, checkpoint
from ragged_shard.testing import SimulatedDevice, run_ranks


@pytest.fixture
def folder(tmp_path):
    text_folder(tmp_path)
    return tmp_path


def runs(folder, optimizer, offload):
    """A run without offload; one with it, to the same end; and one that stops half-way and resumes with it."""
    settings = {"optimizer": optimizer, "save_every": 2, "clip": 0.1}
    device = SimulatedDevice("cpu:0" if "gradients" in offload else "cpu")
    stages = mock.patch.object(
        checkpoint, "_BESIDE_TRAINING", checkpoint._IN_START
    )  # torch's needs an accelerator
    with mock.patch.object(activations, "SMALLEST", 1), stages, device:
        train(tiny(folder, **settings, steps=4), folder / "plain")
        train(tiny(folder, **settings, steps=4, offload=offload), folder / "offloaded")
        train(
            tiny(folder, **settings, steps=4, offload=offload),
            folder / "stopped",
            stop=count().__next__,
        )
        return train(tiny(folder, **settings, steps=4, resume=True, offload=offload), folder / "stopped")


@pytest.mark.filterwarnings("ignore:.*returned a view")
@pytest.mark.parametrize(
    ("optimizer", "offload"),
    [
        ("torch-adamw", ("activations", "states")),
        pytest.param("adamw", ("activations", "gradients", "states"), marks=pytest.mark.long),
    ],
)
def test_losses_are_those_without_offload_also_of_a_resumed_run(folder, optimizer, offload):
    summary, _ = run_ranks(2, runs, folder, optimizer, offload, timeout=200)
    assert 0 < summary["first_step"] < 4
    expected = losses(folder / "plain")
    if "gradients" in offload:  # the norm is summed on the CPU in another order
        expected = pytest.approx(expected, rel=1e-6)
    assert losses(folder / "offloaded") == expected
    assert losses(folder / "stopped") == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offload": ("weights",)}, "weights: expected activations, gradients, states"),
        ({"offload": ("states",), "system": "fsdp2"}, "only fsdp_runtime has it"),
        ({"offload": ("gradients",)}, "add states"),
        ({"offload": ("activations", "states")}, "the device is the CPU"),
    ],
)
def test_an_offload_that_does_not_apply_is_refused_before_anything_starts(folder, changes, message):
    with pytest.raises(TrainError, match=message):
        tiny(folder, **changes).check(2)
