"""The training loop queues the next step before it reads the last one's figures, and never waits for what it queued."""

from train_helpers import text_folder, tiny

from fsdp_runtime.train import Trainer
from fsdp_runtime.train.report import METRICS, read_metrics
from ragged_shard.testing import SimulatedDevice, host_waits


def test_training_waits_nowhere_and_reads_figures_after_their_copy(tmp_path):
    text_folder(tmp_path)
    out = tmp_path / "run"
    out.mkdir()
    with SimulatedDevice():
        trainer = Trainer(tiny(tmp_path, system="one", steps=4, log_every=1), out, quiet=True)
        with host_waits([*trainer.model.parameters(), *trainer.model.buffers()]) as waits:
            trainer.run()
    assert waits.found == []
    assert [entry["step"] for entry in read_metrics(out / METRICS)] == [0, 1, 2, 3]
