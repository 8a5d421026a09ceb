"""The handlers by op. Empty until `table` fills it; apart from it so that the tensor class can look one up."""

from collections.abc import Callable
from typing import Any

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class Handlers(dict[Any, Handler]):
    """Op -> handler; ops outside of the table get the fallback, which knows torch's own layouts only."""

    fallback: Handler

    def __missing__(self, func: Any) -> Handler:
        return self.fallback


HANDLERS = Handlers()
