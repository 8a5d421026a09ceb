"""Handles of collectives that were started."""

import enum
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from . import _patient_calls
from . import _progress as progress
from . import _torch_compat as compat
from ._buffer import DBuffer
from ._order import CollectiveOrder, DisagreementError, watched
from ._patient_calls import Caller, Pending
from .transport.protocol import Work

_DOUBT = 5.0  # seconds of waiting on a CPU after which ranks tell each other what they wait for
_FILES = (__file__, _patient_calls.__file__)
_waiting = threading.local()  # its `caller` makes this thread's waits that ignore timeouts


class HandleState(enum.Enum):
    """The state of a collective.

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
    there. Wait as often as you like, on as many streams as you like. Until the first `wait` has returned, or raised
    the collective's RuntimeError, the buffers count as busy; a signal handler's exception leaves the collective
    under way, and the next `wait` continues.

    Args:
        buffers: marked busy until the first `wait` returns.
        ignores_timeouts: whether gloo's wait for this kind of collective takes no timeout.

    Attributes:
        state: see `HandleState`.
        title: what it is, of which buffers; the same on all ranks.
        group: who takes part; None: this rank alone.
    """

    def __init__(
        self,
        title: str,
        buffers: Sequence[DBuffer],
        group: dist.ProcessGroup | None,
        ignores_timeouts: bool = False,
    ) -> None:
        self.state = HandleState.STARTED
        self.title, self.group = title, group
        self._buffers = buffers
        self._layer = buffers[0].layer
        self._work: Work | None = None
        self._finish: Callable[[], None] | None = None
        self._event: Any = None
        self._error: RuntimeError | None = None
        self._launched = False
        self._order: CollectiveOrder | None = None  # where others compare it with theirs
        self._number = 0  # there
        self._ignores_timeouts = ignores_timeouts
        self._pending: Pending | None = None  # the wait, where it ignores timeouts
        for buffer in buffers:
            buffer.in_flight = self

    def launch(self, start: Callable[[], Work | None], finish: Callable[[], None] | None) -> "Handle":
        """Start the work. From the moment this is called, the buffers' memory may be in use.

        Args:
            start: starts it; None: nothing has to travel, or it was queued on the current stream.
            finish: what to queue when it has completed.

        Raises:
            RuntimeError: it could not start.
        """
        self._finish = finish
        progress.started[self.title] += 1
        order = None if self.group is None else watched.get(self.group)
        if order is not None:
            order.titles.append(self.title)
            order.number += 1
            self._order, self._number = order, order.number
            at = len(order.titles) - 1
            order.unmet = None
            if at >= len(order.expected) or order.expected[at] != self.title:
                order.depart(self._layer)  # before it starts
        try:
            self._work = start()
            if self._layer.asynchronous:
                self._event = self._layer.record()  # all that was queued on the stream of the launch
            self._launched = True
        except BaseException as error:
            # Some of it may have started all the same, unless the ranks were seen to differ before.
            self._fail(f"could not start: {error}", quiet=isinstance(error, DisagreementError))
            if isinstance(error, RuntimeError):
                raise RuntimeError(f"{self.title} could not start: {error}") from error
            raise
        return self

    @property
    def completed(self) -> bool:
        """Whether the collective itself has completed, so that `wait` is without delay. Does not block.

        False while a graph is captured, when the question is not allowed.
        """
        if self._work is not None:
            return not self._layer.capturing and compat.is_completed(self._work)
        if self._event is None or self.state is not HandleState.STARTED:
            return True
        return not self._layer.capturing and self._layer.has_completed(self._event)

    def wait(self) -> None:
        """Let what follows on the current stream see the result.

        Raises:
            RuntimeError: the collective failed (a rank died, a timeout); says which and of which buffers. Again
                on each call.
        """
        if self._error is None:
            if self._event is not None:
                self._layer.wait(self._event)
            if self.state is not HandleState.COMPLETED:
                self._complete()
        self._let_go()  # here too, in case an exception kept an earlier call from it
        if self._error is not None:
            raise self._error

    def _wait_on_cpu(self, work: Any, order: CollectiveOrder) -> None:
        """Wait for torch's work, and where that takes long, ask whether the ranks wait for different collectives."""
        seconds = _DOUBT
        while not self._completes_within(work, seconds):
            if difference := order.check_waiting():
                raise RuntimeError(difference)
            seconds = min(1.5 * seconds, 60.0)

    def _completes_within(self, work: Any, seconds: float) -> bool:
        """Wait at most so long for torch's work; whether it has completed. Raises its error, or a signal handler's."""
        if self._ignores_timeouts:
            if self._pending is None:
                _waiting.caller = caller = getattr(_waiting, "caller", None) or Caller()
                self._pending = caller.start(work.wait)
            if not self._pending.returns_within(seconds):
                return False
            self._pending.result()
            return True
        for each in getattr(work, "works", (work,)):
            try:
                each.wait(timedelta(seconds=seconds))
            except RuntimeError as error:
                if each.is_completed() or _is_from_handler(error):
                    raise
                return False
        return True

    def _is_of_wait(self, error: RuntimeError) -> bool:
        """Whether waiting for torch's work raised this, rather than a signal handler meanwhile."""
        return (self._pending is not None and error is self._pending.error) or not _is_from_handler(error)

    def _complete(self) -> None:
        """Wait, and write the result: once, or never where that was interrupted."""
        if not self._launched or self.state is HandleState.FINISHING:
            self._fail("was interrupted while it was started or its result was written", quiet=False)
            return
        work = self._work
        on_cpu = isinstance(work, compat.WORKS) and not self._layer.asynchronous
        thread = threading.get_ident()
        progress.waits[thread] = (self, time.monotonic())
        try:
            if on_cpu and self._order is not None:
                self._wait_on_cpu(work, self._order)
            elif work is not None:
                work.wait()
        except RuntimeError as error:
            if work is None or getattr(work, "under_way", False) or compat.has_succeeded(work):
                raise  # from a signal handler
            if on_cpu and self._order is not None and not self._is_of_wait(error):
                raise
            difference = self._order.check_waiting() if self._order is not None else ""
            why = error if not difference or difference in str(error) else difference
            self._fail(f"failed: {why}", quiet=getattr(work, "quiet", False), cause=error)
            return
        finally:
            progress.waits.pop(thread, None)
        self.state = HandleState.FINISHING
        try:
            if self._finish is not None:
                self._finish()
            if self._layer.asynchronous:
                self._event = self._layer.record()
            self.state = HandleState.COMPLETED
            if self._order is not None and self._number > self._order.completed[0]:
                self._order.completed = (self._number, self._event)
        except BaseException as error:
            self._fail(f"was interrupted while its result was written: {error!r}", quiet=True)
            raise

    def _fail(self, why: str, *, quiet: bool, cause: BaseException | None = None) -> None:
        if not quiet:
            for buffer in self._buffers:
                buffer.retire()
        if self._pending is not None and not self._pending.returns_within(0):
            _waiting.caller = None  # its thread is still in this collective
        error = RuntimeError(f"{self.title} {why}")
        error.__cause__ = cause
        self._error = error
        self.state = HandleState.FAILED
        self._let_go()

    def _let_go(self) -> None:
        """The buffers are free, unless another collective has them by now."""
        for buffer in self._buffers:
            if buffer.in_flight is self:
                buffer.in_flight = None
        self._work = self._finish = self._pending = None


def _is_from_handler(error: RuntimeError) -> bool:
    """Whether an error of waiting for torch's work was raised by a signal handler, which has a separate frame."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename not in _FILES
