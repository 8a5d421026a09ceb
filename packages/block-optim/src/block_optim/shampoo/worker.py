"""Work that overlaps the training step: in a separate thread, on an accelerator with a separate stream.

    step t:    ... update | submit(jobs)        a job: a snapshot in, a result out; reads nothing else
                               \\------- run one by one during the next forward and backward -------\\
    step t+1:  finish() | ...                                                            results are used from here

A snapshot is freed when its job has completed, while the next one runs. On CUDA it belongs to the step's stream, which
may use its memory again at once: so the thread first waits for the event behind the job.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from ragged_shard import DeviceLayer, device_layer

T = TypeVar("T")


class Worker:
    """Runs one list of jobs at a time. The thread starts with the first job, and ends with this object."""

    def __init__(self, device: torch.device) -> None:
        self._layer = device_layer(device)
        self._threads: ThreadPoolExecutor | None = None
        self._stream: Any = None
        self._running: tuple[Future[list[Any]], Callable[[list[Any]], None]] | None = None

    def submit(self, jobs: list[Callable[[], T]], commit: Callable[[list[T]], None]) -> None:
        """Start jobs; `finish` gives their results to ``commit``. Until then tensors that they read must not change.

        Args:
            jobs: is emptied as they run, so that what a job alone holds goes when it has completed.
            commit: takes the results, in order.
        """
        assert self._running is None, "one list of jobs at a time"
        if self._threads is None:
            # A new thread has another default: other bits, and other cores.
            count = torch.get_num_threads()
            self._threads = ThreadPoolExecutor(
                1, "block_optim", initializer=torch.set_num_threads, initargs=(count,)
            )
        if self._stream is None:
            self._stream = self._layer.new_stream()
        ready = self._layer.record()
        self._running = self._threads.submit(_in_turn, jobs, self._layer, self._stream, ready), commit

    @property
    def is_busy(self) -> bool:
        """Whether jobs have been submitted since `finish` or `drop`."""
        return self._running is not None

    def finish(self) -> None:
        """Wait for the jobs, if there are any, and commit their results. Raises what a job raised."""
        running, self._running = self._running, None
        if running is not None:
            results, commit = running[0].result(), running[1]
            commit(results)
            self._layer.wait(self._layer.record(), self._stream)  # whose pool the results go back to

    def drop(self) -> None:
        """Wait for the jobs, if there are any, and forget their results."""
        running, self._running = self._running, None
        if running is not None:
            running[0].result()


def _in_turn(jobs: list[Callable[[], T]], layer: DeviceLayer, stream: Any, ready: Any) -> list[T]:
    """Run jobs after `ready`; returns when the device has completed them."""
    results = []
    with torch.no_grad(), layer.on(stream, (ready,)):
        while jobs:
            results.append(jobs[0]())
            layer.wait_on_host(layer.record())  # the snapshot is freed to the step's stream
            del jobs[0]
    return results
