"""Names of another project's modules, replaced for a while: where it has no option for what an adapter needs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(module: Any, **values: Any) -> Iterator[None]:
    """Inside, these names of a module have these values."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)
