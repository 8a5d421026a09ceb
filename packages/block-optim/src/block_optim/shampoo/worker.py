"""Work next to the training step: a thread of its own, on CUDA with a stream of its own.

    step t:    ... update | submit(job)         job: snapshots in, results out; reads nothing else
                               \\------- runs during the next forward and backward -------\\
    step t+1:  finish() | ...                                                            results are used from here
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class Worker:
    """Runs one job at a time. The thread exists from the first job on, and goes with this object."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._finish: Callable[[], None] | None = None

    def submit(self, job: Callable[[], T], commit: Callable[[T], None]) -> None:
        """Start a job; `finish` gives its result to ``commit``. Until then tensors that it reads must not change."""
        assert self._finish is None, "one job at a time"
        if self._threads is None:
            # A new thread has a default of its own: other bits, and other cores.
            count = torch.get_num_threads()
            self._threads = ThreadPoolExecutor(
                1, "block_optim", initializer=torch.set_num_threads, initargs=(count,)
            )
        if self._device.type == "cpu":
            running = self._threads.submit(_quietly, job)
            self._finish = lambda: commit(running.result())
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        ready = torch.cuda.current_stream(self._device).record_event()
        launched = self._threads.submit(_on_stream, job, self._stream, ready)
        self._finish = lambda: commit(self._after(launched))

    def _after(self, launched: "Future[tuple[T, torch.cuda.Event]]") -> T:
        value, done = launched.result()
        torch.cuda.current_stream(self._device).wait_event(done)
        return value

    def finish(self) -> None:
        """Wait for the job, if there is one, and commit it; the current stream waits for its kernels.

        Raises what the job raised.
        """
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


def _quietly(job: Callable[[], T]) -> T:
    with torch.no_grad():
        return job()


def _on_stream(
    job: Callable[[], T], stream: torch.cuda.Stream, ready: torch.cuda.Event
) -> tuple[T, torch.cuda.Event]:
    with torch.no_grad(), torch.cuda.stream(stream):
        stream.wait_event(ready)
        value = job()
        return value, stream.record_event()
