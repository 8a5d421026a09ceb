"""What a collective that was started returns."""

from collections.abc import Callable
from typing import Any

from . import _torch_compat as compat
from ._device import DeviceLayer


class Handle:
    """A collective under way, of one or several buffers.

    On CUDA `wait` makes the current stream wait and does not block the CPU; on CPU it blocks until the data are
    there. Wait as often as you like, on as many streams as you like. Until the first `wait` the buffers count as
    busy.
    """

    def __init__(
        self, what: str, layer: DeviceLayer, work: Any, finish: Callable[[], None], settle: Callable[[], None]
    ) -> None:
        self._what = what
        self._layer = layer
        self._work = work
        self._finish: Callable[[], None] | None = finish
        self._settle = settle
        self._event = layer.record()  # all that was queued beside the collective, on the stream of the launch
        self._error: RuntimeError | None = None

    @property
    def waited(self) -> bool:
        """Whether `wait` was called, so that the buffers are free for what comes next."""
        return self._finish is None

    @property
    def landed(self) -> bool:
        """Whether the collective itself is over, so that `wait` is without delay. Does not block."""
        return self._work is None or compat.is_completed(self._work)

    def wait(self) -> None:
        """Let what follows on the current stream see the result.

        Raises:
            RuntimeError: the collective failed (a rank died, a time-out); says which and of which buffers. Again
                on each call.
        """
        if self._error is not None:
            raise self._error
        self._layer.wait(self._event)
        if self._finish is None:
            return
        finish, self._finish = self._finish, None
        self._settle()
        try:
            if self._work is not None:
                self._work.wait()
            finish()
        except RuntimeError as error:
            self._error = RuntimeError(f"{self._what} failed: {error}")
            raise self._error from error
        finally:
            self._work = None
        self._event = self._layer.record()
