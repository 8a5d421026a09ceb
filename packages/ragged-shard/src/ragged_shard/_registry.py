"""The handlers by op, filled by `table`. A separate module, so that the tensor class can look handlers up."""

from collections.abc import Callable
from typing import Any

from ragged_shard._torch_compat import Op

Handler = Callable[[Op, tuple[Any, ...], dict[str, Any]], Any]


class Handlers(dict[Op, Handler]):
    """Op -> handler; an op that is not in the table gets the fallback, which refuses ragged operands."""

    fallback: Handler

    def __missing__(self, func: Op) -> Handler:
        return self.fallback


HANDLERS = Handlers()
