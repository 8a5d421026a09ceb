"""`--offload-activations` on the simulated device: the losses of a run without it, also after it was resumed."""

from itertools import count
from unittest import mock

import pytest
from train_helpers import losses, tiny, train, with_changes

from fsdp_runtime.memory import activations
from ragged_shard.testing import SimulatedDevice, run_ranks


def runs(folder, out):
    """A run without it; one with it, to the same end; and one that stops half-way and resumes with it."""
    plain = tiny(folder, optimizer="torch-adamw", save_every=2, clip=0.1, steps=4)
    with_it = with_changes(plain, offload_activations=True)
    with mock.patch.object(activations, "SMALLEST", 1), SimulatedDevice("cpu"):
        train(plain, out / "plain")
        train(with_it, out / "offloaded")
        train(with_it, out / "stopped", stop=count().__next__)
        return train(with_changes(with_it, resume=True), out / "stopped")


@pytest.mark.long
def test_losses_are_those_without_offload_also_of_a_resumed_run(folder, tmp_path):
    summary, _ = run_ranks(2, runs, folder, tmp_path, timeout=200)
    assert 0 < summary["first_step"] < 4
    expected = losses(tmp_path / "plain")
    assert losses(tmp_path / "offloaded") == losses(tmp_path / "stopped") == expected
