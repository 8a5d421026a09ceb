"""Calls that may not return for many minutes, made on a thread or with a time-out, so that who waits can give up."""

import queue
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial, partialmethod
from typing import Any

from torch.distributed.distributed_c10d import Store

_DOUBT = 5.0  # seconds of waiting on a CPU after which ranks publish their waits
_waiting = threading.local()  # its `caller` makes this thread's waits that ignore timeouts


class Pending:
    """A call that a `Caller` makes.

    Args:
        call: the function; freed once it has returned.

    Attributes:
        error: its exception.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._done = threading.Event()
        self._value: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        """Make the call, in the caller's thread."""
        try:
            self._value = self._call()
        except Exception as error:  # raised by `result`
            self.error = error
        del self._call
        self._done.set()

    def returns_within(self, seconds: float) -> bool:
        """Whether the call has returned or raised, after waiting at most this long."""
        return self._done.wait(seconds)

    def result(self) -> Any:
        """The call's value, or its error raised again. Only once it has ended."""
        if self.error is not None:
            raise self.error
        return self._value


class Caller:
    """A thread that makes calls one after another. It starts with the first call and ends with this object."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, call: Callable[[], Any]) -> Pending:
        """Queue a call for the thread, behind earlier ones."""
        if self._thread is None or not self._thread.is_alive():  # a forked process has no threads
            self._calls = queue.SimpleQueue()
            self._thread = threading.Thread(
                target=_serve, args=(self._calls,), name="dbuffer calls", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._calls.put, None).atexit = False
        pending = Pending(call)
        self._calls.put(pending)
        return pending


def _serve(calls: "queue.SimpleQueue[Pending | None]") -> None:
    while pending := calls.get():
        pending.run()
        del pending  # else it lives until the next call


class PatientStore:
    """Some of a `Store`'s methods, which raise RuntimeError where the store does not answer in time.

    Args:
        store: where requests go.
        seconds: how long a request may take. torch's TCPStore waits for TCP's retransmissions, about 15 minutes.
    """

    def __init__(self, store: Store, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self._caller = Caller()

    def _ask(self, method: str, *arguments: Any) -> Any:
        pending = self._caller.start(partial(getattr(self._store, method), *arguments))
        if not pending.returns_within(self._seconds):
            raise RuntimeError(f"the store has not answered for {self._seconds:g} s (request {method!r})")
        return pending.result()

    set = partialmethod(_ask, "set")
    get = partialmethod(_ask, "get")
    add = partialmethod(_ask, "add")
    append = partialmethod(_ask, "append")
    check = partialmethod(_ask, "check")
    compare_set = partialmethod(_ask, "compare_set")
    delete_key = partialmethod(_ask, "delete_key")
    num_keys = partialmethod(_ask, "num_keys")


class HostWait:
    """The wait on a CPU for torch's work, during which ranks publish their waits.

    Args:
        work: of one collective, or of several that were coalesced.
        check: compares the ranks' waits; a sentence if they differ, else empty.
        ignores_timeouts: whether gloo's wait for this kind of collective takes no timeout.
    """

    def __init__(self, work: Any, check: Callable[[], str], ignores_timeouts: bool) -> None:
        self._work, self._check, self._ignores_timeouts = work, check, ignores_timeouts
        self._pending: Pending | None = None  # the wait, where it ignores timeouts

    def wait(self) -> None:
        """Block until the work has completed. Continues where a signal handler's exception interrupted it.

        Raises:
            RuntimeError: it failed, or the ranks wait for different collectives.
        """
        seconds = _DOUBT
        while not self._completes_within(seconds):
            if difference := self._check():
                raise RuntimeError(difference)
            seconds = min(1.5 * seconds, 60.0)

    def has_raised(self, error: RuntimeError) -> bool:
        """Whether the work raised this, rather than a signal handler during the wait, which has a separate frame."""
        if self._pending is not None and error is self._pending.error:
            return True
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        return trace is None or trace.tb_frame.f_code.co_filename == __file__

    def give_up(self) -> None:
        """Leave the work: a thread that is still in its wait serves no other."""
        if self._pending is not None and not self._pending.returns_within(0):
            _waiting.caller = None

    def _completes_within(self, seconds: float) -> bool:
        """Wait at most so long; whether the work has completed. Raises its error, or a signal handler's."""
        if self._ignores_timeouts:
            if self._pending is None:
                _waiting.caller = caller = getattr(_waiting, "caller", None) or Caller()
                self._pending = caller.start(self._work.wait)
            if not self._pending.returns_within(seconds):
                return False
            self._pending.result()
            return True
        for each in getattr(self._work, "works", (self._work,)):
            try:
                each.wait(timedelta(seconds=seconds))
            except RuntimeError as error:
                if each.is_completed() or not self.has_raised(error):
                    raise
                return False
        return True
