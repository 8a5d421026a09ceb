"""What a collective that was started returns."""

import enum
from collections.abc import Callable, Sequence
from typing import Any

from . import _torch_compat as compat
from ._memory import BufferMemory
from .transport.protocol import Work, is_quiet


class HandleState(enum.Enum):
    """Where a collective stands.

    STARTED     it was launched, or is about to be; its buffers are busy
    FINISHING   its bytes are there; what follows on this rank (a cast, a sum) is being queued
    COMPLETED   its buffers are free for what comes next
    FAILED      it will never complete; `wait` raises. Memory that something may still write is out of use for good.

        STARTED --wait--> FINISHING --> COMPLETED
           '--the work raised--'--interrupted--> FAILED
    """

    STARTED = enum.auto()
    FINISHING = enum.auto()
    COMPLETED = enum.auto()
    FAILED = enum.auto()


class Handle:
    """A collective under way, of one or several buffers.

    On CUDA `wait` makes the current stream wait and does not block the CPU; on CPU it blocks until the data are
    there. Wait as often as you like, on as many streams as you like. Until the first `wait` has returned or raised
    RuntimeError the buffers count as busy; an exception of another kind (a signal handler's) leaves the
    collective under way, and the next `wait` goes on.

    Attributes:
        state: see `HandleState`.
    """

    def __init__(self, what: str, memories: Sequence[BufferMemory]) -> None:
        self.state = HandleState.STARTED
        self._what = what
        self._memories = memories
        self._layer = memories[0].spec.layer
        self._work: Work | None = None
        self._finish: Callable[[], None] | None = None
        self._event: Any = None
        self._error: RuntimeError | None = None
        for memory in memories:
            memory.in_flight = self

    def launch(self, start: Callable[[], Work | None], finish: Callable[[], None] | None) -> "Handle":
        """Start the work. From the moment this is called, the buffers' memory may be in use.

        Args:
            start: starts it; None: nothing has to travel.
            finish: what to queue when it has completed.

        Raises:
            RuntimeError: it could not start.
        """
        try:
            self._work = start()
        except BaseException as error:
            # Some of it may have started all the same.
            self._fail(f"could not start: {error}", quiet=False)
            if isinstance(error, RuntimeError):
                raise RuntimeError(f"{self._title()} could not start: {error}") from error
            raise
        self._finish = finish
        if self._layer.asynchronous:
            self._event = self._layer.record()  # all that was queued in addition, on the stream of the launch
        return self

    def _title(self) -> str:
        return f"{self._what} of {', '.join(memory.name for memory in self._memories)}"

    @property
    def waited(self) -> bool:
        """Whether the buffers are free: it has completed, or failed, and `wait` said so."""
        return self.state is HandleState.COMPLETED or self.state is HandleState.FAILED

    @property
    def completed(self) -> bool:
        """Whether the collective itself has completed, so that `wait` is without delay. Does not block."""
        return self._work is None or compat.is_completed(self._work)

    def wait(self) -> None:
        """Let what follows on the current stream see the result.

        Raises:
            RuntimeError: the collective failed (a rank died, a timeout); says which and of which buffers. Again
                on each call.
        """
        if self._error is not None:
            raise self._error
        if self._event is not None:
            self._layer.wait(self._event)
        if self.state is HandleState.COMPLETED:
            return
        work = self._work
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:
            self._fail(f"failed: {error}", quiet=work is None or is_quiet(work))
            assert self._error is not None
            raise self._error from error
        self.state = HandleState.FINISHING
        try:
            if self._finish is not None:
                self._finish()
            if self._layer.asynchronous:
                self._event = self._layer.record()
        except BaseException as error:
            self._fail(f"was interrupted while its result was written: {error!r}", quiet=True)
            raise
        self._free(HandleState.COMPLETED)

    def _fail(self, why: str, *, quiet: bool) -> None:
        self._error = RuntimeError(f"{self._title()} {why}")
        if not quiet:
            for memory in self._memories:
                memory.condemn()
        self._free(HandleState.FAILED)

    def _free(self, state: HandleState) -> None:
        self.state = state
        self._work = self._finish = None
        for memory in self._memories:
            memory.in_flight = None
