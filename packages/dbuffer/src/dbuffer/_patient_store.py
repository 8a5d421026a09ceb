"""A store whose requests end: one that is cut off from this process may not answer for many minutes."""

import queue
import threading
import weakref
from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any

from torch.distributed.distributed_c10d import Store

_Answer = queue.SimpleQueue[tuple[Any, Exception | None]]
_Requests = queue.SimpleQueue[tuple[Callable[[], Any], _Answer] | None]


def _serve(requests: _Requests) -> None:
    while request := requests.get():
        call, answer = request
        try:
            answer.put((call(), None))
        except Exception as error:  # raised where the answer is read
            answer.put((None, error))


class PatientStore:
    """Some of a `Store`'s methods. A thread makes the requests, and one without an answer raises RuntimeError.

    Args:
        store: where requests go.
        seconds: how long a request may take. torch's TCPStore waits for TCP's retransmissions, about 15 minutes.
    """

    def __init__(self, store: Store, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self._requests: _Requests | None = None

    def _ask(self, method: str, *arguments: Any) -> Any:
        if self._requests is None:
            self._requests = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._requests,), name="dbuffer store", daemon=True).start()
            weakref.finalize(self, self._requests.put, None).atexit = False  # ends the thread
        answer: _Answer = queue.SimpleQueue()
        self._requests.put((partial(getattr(self._store, method), *arguments), answer))
        try:
            value, error = answer.get(timeout=self._seconds)
        except queue.Empty:
            raise RuntimeError(
                f"the store has not answered for {self._seconds:g} s (request {method!r})"
            ) from None
        if error is not None:
            raise error
        return value

    set = partialmethod(_ask, "set")
    get = partialmethod(_ask, "get")
    add = partialmethod(_ask, "add")
    check = partialmethod(_ask, "check")
    compare_set = partialmethod(_ask, "compare_set")
    delete_key = partialmethod(_ask, "delete_key")
    num_keys = partialmethod(_ask, "num_keys")
