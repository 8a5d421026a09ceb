"""The training loop queues the next step before it reads the last one's figures, and never waits for what it queued."""

from train_helpers import tiny

from fsdp_runtime.train import Trainer
from fsdp_runtime.train.report import METRICS, read_metrics
from ragged_shard.testing import SimulatedDevice, host_waits


def test_training_waits_nowhere_and_reads_figures_after_their_copy(folder, tmp_path):
    with SimulatedDevice():
        trainer = Trainer(tiny(folder, system="one", steps=4, log_every=1), tmp_path, quiet=True)
        with host_waits([*trainer.model.parameters(), *trainer.model.buffers()]) as waits:
            trainer.run()
    assert waits.lines == []
    assert [entry["step"] for entry in read_metrics(tmp_path / METRICS)] == [0, 1, 2, 3]
