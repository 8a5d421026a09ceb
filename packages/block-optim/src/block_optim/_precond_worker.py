"""Work beside the training step: a thread of its own, on CUDA with a stream of its own.

    step t:    ... update | submit(job)         job: snapshots in, results out; reads nothing else
                               \\------- runs during the next forward and backward -------\\
    step t+1:  result() | ...                                                            results are used from here
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch


class Worker:
    """Runs one job at a time. The thread exists from the first job on, and goes with this object."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads: ThreadPoolExecutor | None = None
        self._stream: Any = None
        self._job: Future[Any] | None = None

    @property
    def busy(self) -> bool:
        """Whether a job's result has not been taken."""
        return self._job is not None

    def submit(self, job: Callable[[], Any]) -> None:
        """Start a job; tensors that it reads must not be written until `result()`."""
        assert self._job is None, "one job at a time"
        if self._threads is None:
            count = (
                torch.get_num_threads()
            )  # a new thread has a default of its own: other bits, and other cores
            self._threads = ThreadPoolExecutor(
                1, "block_optim", initializer=torch.set_num_threads, initargs=(count,)
            )
        if self._device.type == "cpu":
            self._job = self._threads.submit(_quietly, job)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        ready = torch.cuda.current_stream(self._device).record_event()
        self._job = self._threads.submit(_on_stream, job, self._stream, ready)

    def result(self) -> Any:
        """Wait for the job; the current stream waits for its kernels. Raises what the job raised."""
        assert self._job is not None
        job, self._job = self._job, None
        found = job.result()
        if self._device.type == "cpu":
            return found
        value, done = found
        torch.cuda.current_stream(self._device).wait_event(done)
        return value


def _quietly(job: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return job()


def _on_stream(job: Callable[[], Any], stream: Any, ready: Any) -> tuple[Any, Any]:
    with torch.no_grad(), torch.cuda.stream(stream):
        stream.wait_event(ready)
        value = job()
        return value, stream.record_event()
