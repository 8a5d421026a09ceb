"""On an accelerator training waits nowhere, and values are copied for a checkpoint during the next two passes."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from train_helpers import newest, tiny

from fsdp_runtime.train import Trainer, checkpoint
from fsdp_runtime.train.report import METRICS, read_metrics
from ragged_shard.testing import SimulatedDevice, host_waits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|not available)")


class Stager:
    """Stands for torch's on a GPU: copies in a thread, once `released`."""

    should_synchronize_after_execute = False

    def __init__(self, options):
        assert options.use_pinned_memory
        assert options.use_async_staging
        self.released = threading.Event()
        self.log: list[str] = []
        self._thread = ThreadPoolExecutor(1)
        self.fails = False

    def stage(self, state_dict):
        def copied():
            assert self.released.wait(60)
            if self.fails:
                raise RuntimeError("cudaHostRegister failed")
            self.log.append("copied")
            return copy.deepcopy(state_dict)

        return self._thread.submit(copied)

    def close(self):
        self._thread.shutdown()


@pytest.fixture
def run(folder, tmp_path, monkeypatch):
    """A run that saves after its second step, its stager, and the weights at that moment."""
    monkeypatch.setattr(checkpoint, "DefaultStager", Stager)
    with SimulatedDevice():
        trainer = Trainer(tiny(folder, system="one", steps=3, save_every=2), tmp_path, quiet=True)
    checkpoints = trainer.checkpoints
    stager, wait, saved = checkpoints._stager, checkpoints.wait_for_copies, {}
    trainer.model.register_buffer("count", torch.zeros(()))

    def release_and_wait():  # a step that does not wait comes first
        stager.released.set()
        wait()

    def count(module, _):
        module.count.add_(1)

    def before_step(*_):
        stager.log.append("step")
        if stager.log.count("step") == 3:
            stager.released.set()
            saved.update({name: p.detach().clone() for name, p in trainer.model.named_parameters()})

    def watch(gradient):
        stager.log.append("backward")

    checkpoints.wait_for_copies = lambda: release_and_wait() if checkpoints._copied else None
    trainer.model.register_forward_pre_hook(count)
    next(trainer.model.parameters()).register_hook(watch)
    trainer.optimizer.register_step_pre_hook(before_step)
    return trainer, stager, saved


def test_a_checkpoint_has_the_values_of_its_step_although_training_goes_on(run, tmp_path):
    trainer, stager, saved = run
    with SimulatedDevice():
        trainer.checkpoints.keep = 9
        trainer.run()
    assert stager.log[:8] == ["backward", "step", "backward", "step", "backward", "copied", "step", "copied"]
    path = newest(tmp_path).with_name("step-00000002")
    read = {"model": {name: torch.empty_like(value) for name, value in saved.items()}}
    read["model"]["count"] = torch.zeros(())
    load(read, checkpoint_id=path)
    assert all(torch.equal(read["model"][name], value) for name, value in saved.items())
    assert read["model"]["count"] == 2


def test_a_copy_that_fails_is_the_saves_failure(run):
    trainer, stager, _ = run
    stager.fails = True
    with (
        SimulatedDevice(),
        pytest.raises(checkpoint.TrainError, match=r"cannot save .*cudaHostRegister failed"),
    ):
        trainer.run()


def test_training_waits_nowhere_and_reads_figures_after_their_copy(folder, tmp_path):
    with SimulatedDevice():
        trainer = Trainer(tiny(folder, system="one", steps=4, log_every=1), tmp_path, quiet=True)
        with host_waits([*trainer.model.parameters(), *trainer.model.buffers()]) as waits:
            trainer.run()
    assert waits.lines == []
    assert [entry["step"] for entry in read_metrics(tmp_path / METRICS)] == [0, 1, 2, 3]
