"""Calls that may not return for many minutes, made on a thread, so that who waits for one can give up."""

import queue
import threading
import weakref
from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any

from torch.distributed.distributed_c10d import Store


class Pending:
    """A call that a `Caller` makes.

    Args:
        call: the function; freed once it has returned.

    Attributes:
        error: what it raised.
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
