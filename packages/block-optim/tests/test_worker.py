"""Work next to the training step, and how long it holds memory."""

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from shampoo_helpers import parameter
from torch.utils._pytree import tree_leaves

from block_optim import SOAP, Shampoo
from block_optim.shampoo.worker import Worker

CPU = torch.device("cpu")


class Watched(Worker):
    """Notes the bytes of snapshots that live when a job begins."""

    def __init__(self):
        super().__init__(CPU)
        self.snapshots, self.before = [], []

    @property
    def live(self):
        return sum(t.nbytes for reference in self.snapshots if (t := reference()) is not None)

    def submit(self, jobs, commit):
        self.snapshots += [
            weakref.ref(t) for job in jobs for t in tree_leaves(job.args) if isinstance(t, torch.Tensor)
        ]
        jobs[:] = [partial(self.run, job) for job in jobs]
        super().submit(jobs, commit)

    def run(self, job):
        self.before.append(self.live)
        return job()


@pytest.mark.parametrize("kind", [Shampoo, SOAP])
def test_a_snapshot_is_freed_when_its_job_has_completed(kind):
    params = [parameter((16, 8)), parameter((12, 20))]
    options = {"max_preconditioner_dim": 16, "precondition_frequency": 2, "stagger": False}
    optimizer = kind(params, lr=0.1, overlap=True, **options)
    worker: Any = Watched()
    optimizer._worker = worker
    for _ in range(5):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
        if worker.snapshots:
            break
    worker._running[0].result()
    assert len(worker.before) > 1
    assert worker.before == sorted(set(worker.before), reverse=True), (
        "each job begins with less than the last"
    )
    assert worker.live == 0
    optimizer.synchronize()


def test_results_of_a_skipped_step_are_dropped_and_errors_are_raised():
    committed: list[list[int]] = []
    worker = Worker(CPU)
    worker.submit([lambda: 1, lambda: 2], committed.append)
    worker.drop()
    worker.finish()
    assert committed == []
    worker.submit([lambda: 3], committed.append)
    worker.finish()
    assert committed == [[3]]
    failing: list[Any] = [lambda: 1 / 0]
    worker.submit(failing, committed.append)
    with pytest.raises(ZeroDivisionError):
        worker.finish()
