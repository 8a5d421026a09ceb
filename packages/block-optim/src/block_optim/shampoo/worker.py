"""Work next to the training step: a thread of its own, on an accelerator with a stream of its own.

    step t:    ... update | submit(job)         job: snapshots in, results out; reads nothing else
                               \\------- runs during the next forward and backward -------\\
    step t+1:  finish() | ...                                                            results are used from here
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from ragged_shard import DeviceLayer, device_layer

T = TypeVar("T")


class Worker:
    """Runs one job at a time. The thread exists from the first job on, and goes with this object."""

    def __init__(self, device: torch.device) -> None:
        self._layer = device_layer(device)
        self._threads: ThreadPoolExecutor | None = None
        self._stream: Any = None
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
        if self._stream is None:
            self._stream = self._layer.new_stream()
        ready = self._layer.record()
        launched = self._threads.submit(_on_stream, job, self._layer, self._stream, ready)
        self._finish = lambda: self._commit(launched, job, commit)

    def _commit(
        self, launched: "Future[tuple[T, Any]]", job: Callable[[], T], commit: Callable[[T], None]
    ) -> None:
        """Use the result on the current stream. What the job read is held until here: the side stream may read late."""
        value, done = launched.result()
        self._layer.wait(done)
        del job
        commit(value)
        self._layer.wait(self._layer.record(), self._stream)  # whose pool the result goes back to

    def finish(self) -> None:
        """Wait for the job, if there is one, and commit it; the current stream waits for its kernels.

        Raises what the job raised.
        """
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


def _on_stream(job: Callable[[], T], layer: DeviceLayer, stream: Any, ready: Any) -> tuple[T, Any]:
    """Run the job after `ready`: its result, and an event at its end."""
    with torch.no_grad(), layer.on(stream, (ready,)):
        value = job()
        return value, layer.record()
