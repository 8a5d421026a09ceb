"""A work with something to do when it has completed."""

from collections.abc import Callable

from .protocol import Work, is_quiet, is_under_way


class Then:
    """A work with something to do when it has completed, exactly once.

    Attributes:
        work: set before the first `wait`.

    Raises:
        RuntimeError: at `wait`, also where the action was interrupted: it may be half done, and is not done twice.
    """

    work: Work

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action
        self._done = self._failed = False

    @property
    def quiet(self) -> bool:
        """Whether nothing touches the tensors any more."""
        return is_quiet(self.work)

    @property
    def under_way(self) -> bool:
        """Whether `wait` has not raised an error of its own."""
        return not self._failed and is_under_way(self.work)

    def wait(self) -> None:
        """Block until the work has completed, then act."""
        self.work.wait()
        if self._done:
            return
        action, self._action = self._action, None
        if action is None:
            error = RuntimeError("it was interrupted while its result was written")
            self._failed = True
            raise error
        action()
        self._done = True

    def is_completed(self) -> bool:
        """Whether `wait` would not block."""
        return self.work.is_completed()
